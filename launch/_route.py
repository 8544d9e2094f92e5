"""How this machine reaches another: prints that one's IPv4 address, this one's own towards it, and the interface that has it, if any."""

import fcntl
import socket
import struct
import sys

SIOCGIFADDR = 0x8915

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((sys.argv[1], int(sys.argv[2])))  # a datagram socket: nothing is sent
    peer, own = probe.getpeername()[0], probe.getsockname()[0]
    found = ""
    for _, name in socket.if_nameindex():
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
        except OSError:
            continue  # an interface without an IPv4 address
        if socket.inet_ntoa(answer[20:24]) == own:
            found = name
print(peer, own, found)
