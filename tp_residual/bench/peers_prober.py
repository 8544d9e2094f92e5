"""How fast memory can be read right now: a small process that reads an array larger than the caches whenever it is asked, and else waits.

    python peers_prober.py BYTES THREADS        each line on stdin: seconds to read for; each reply: bytes read, seconds taken

Reading is the C library's search for a byte that is not there, its fastest pass over memory that writes nothing. Needs nothing but
Python, so that it takes no memory beside the array and starts at once.
"""

import ctypes
import mmap
import sys
import time
from concurrent.futures import ThreadPoolExecutor

_PRESENT, _ABSENT = b"\x01", 0xFF
_CHUNK = 1 << 22  # of one search: short against a probe, long against a call


def main(nbytes: int, threads: int) -> None:
    libc = ctypes.CDLL(None)
    libc.memchr.argtypes, libc.memchr.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    each = nbytes // threads // _CHUNK * _CHUNK
    arrays = [mmap.mmap(-1, each) for _ in range(threads)]
    for array in arrays:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            array.madvise(mmap.MADV_HUGEPAGE)  # as engines have their weights
        for _ in range(each // _CHUNK):
            array.write(_PRESENT * _CHUNK)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(array)) for array in arrays]
    positions = [0] * threads

    def read(thread: int, until: float) -> int:
        """Goes on where the last probe ended: what that left in the cache comes last."""
        done = 0
        while time.perf_counter() < until:
            if libc.memchr(addresses[thread] + positions[thread], _ABSENT, _CHUNK) is not None:
                raise AssertionError("the array holds a byte that was never written")
            positions[thread] = (positions[thread] + _CHUNK) % each
            done += _CHUNK
        return done

    with ThreadPoolExecutor(threads) as pool:
        for line in sys.stdin:
            began = time.perf_counter()
            until = began + float(line)
            done = sum(pool.map(read, range(threads), [until] * threads))
            print(done, time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
