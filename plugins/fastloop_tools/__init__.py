"""Commands implemented as plugins: ``fastloop bench``, ``profile``, ``tune``, ``report`` and ``new``.

The core imports none of them."""
