"use strict";
(() => {
  const status = document.getElementById("live"), running = status.textContent;
  let version = document.documentElement.dataset.version;
  const keyOf = part => part.dataset.key || part.getAttribute("aria-label") || part.getAttribute("aria-labelledby");
  const partsOf = root => new Map([...root.querySelectorAll("details, [tabindex]")].map(part => [part.tagName + keyOf(part), part]));

  // Show the new page, with the same scroll positions, open details and focus.
  const show = text => {
    const page = new DOMParser().parseFromString(text, "text/html"), old = document.querySelector("main");
    const main = document.adoptNode(page.querySelector("main")), top = scrollY, after = partsOf(main);
    const before = [...partsOf(old)].map(([key, part]) => [key, part.open, part.scrollLeft, part.contains(document.activeElement)]);
    for (const [key, open] of before) if (after.get(key)?.tagName === "DETAILS") after.get(key).open = open;
    old.replaceWith(main);
    for (const [key, , left, focused] of before) {
      const part = after.get(key);
      if (!part) continue;
      part.scrollLeft = left;
      if (focused) (part.querySelector("summary") || part).focus({ preventScroll: true });
    }
    scrollTo(scrollX, top);
    document.title = page.title;
    version = page.documentElement.dataset.version;
  };

  const update = async () => {
    try {
      if (!document.hidden && (await (await fetch("version", { cache: "no-store" })).text()) !== version)
        show(await (await fetch("./", { cache: "no-store" })).text());
      if (status.className) [status.className, status.textContent] = ["", running];
    } catch {
      [status.className, status.textContent] = ["ended", "fastloop report --watch has ended. The page shows its last state."];
    }
    setTimeout(update, 1000);
  };
  setTimeout(update, 1000);
})();
