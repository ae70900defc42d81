"""A proxy command: stdin and stdout to a TCP port."""

import os
import select
import socket
import sys

link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while True:
    for ready in select.select([0, link], [], [])[0]:
        data = os.read(0, 65536) if ready == 0 else link.recv(65536)
        if not data:
            sys.exit()
        if ready == 0:
            link.sendall(data)
        else:
            os.write(1, data)
