"""Commands implemented as plugins: ``fastloop bench``, ``profile``, ``report`` and ``new``.

The core imports none of them."""
