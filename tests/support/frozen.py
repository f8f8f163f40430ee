"""The last module that the fork server imports: garbage collection leaves out all that was imported.

Each collection in a fork would visit a million objects, which takes half a second and copies the pages they are in.
"""

import atexit
import gc

gc.freeze()
atexit.register(gc.unfreeze)  # triton complains about what is left when the server ends
