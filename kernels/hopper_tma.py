"""TMA's copies under the names that Triton 3.6 has for them: 3.8 renamed them, 3.9 lacks the old.

The one place that knows. The kernels' own text stays, and with it the hash that data is kept by.
"""

from triton.experimental.gluon.language.nvidia.hopper import tma

_renamed = hasattr(tma, "async_load")
async_copy_global_to_shared = tma.async_load if _renamed else tma.async_copy_global_to_shared
async_copy_shared_to_global = tma.async_store if _renamed else tma.async_copy_shared_to_global
store_wait = tma.store_wait
