"""Peers on a network that drops packets. Run inside `unshare -rn`: python -m peer.lossy LOSS FOLDER

A tunnel device hands every packet for 10.9.1.1 to this program, which drops some and sends the
others back with source and destination swapped: whoever connects to 10.9.1.1 reaches 10.9.0.1 on
this machine. (Swapping leaves the checksums right.)
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.link.roster import ROSTER, Roster

from .swarm import Options, build, make_folders

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
HERE, THERE = "10.9.0.1", "10.9.1.1"


def tunnel(loss: float, tally: dict[str, int]) -> None:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"lossy", IFF_TUN | IFF_NO_PI))
    for command in ("link set lo up", f"addr add {HERE}/16 dev lossy", "link set lossy up"):
        subprocess.run(["ip", *command.split()], check=True)

    def reflect() -> None:
        chance = random.Random(0)
        while True:
            packet = bytearray(os.read(device, 65536))
            if packet[0] >> 4 != 4:
                continue
            tally["packets"] += 1
            if chance.random() < loss:
                tally["lost"] += 1
                continue
            packet[12:16], packet[16:20] = packet[16:20], packet[12:16]
            os.write(device, bytes(packet))

    threading.Thread(target=reflect, daemon=True).start()


def main() -> None:
    loss, root = float(sys.argv[1]), Path(sys.argv[2])
    tally = {"packets": 0, "lost": 0}
    tunnel(loss, tally)
    folders = make_folders(root, 3)
    roster = Roster.read(folders[0] / ROSTER)
    ports = [member.address.rpartition(":")[2] for member in roster.members]
    members = tuple(
        replace(member, address=f"{THERE}:{port}")
        for member, port in zip(roster.members, ports, strict=True)
    )
    for folder in folders:
        replace(roster, members=members).write(folder / ROSTER)
    options = Options(size=2000, rounds=4, mode="sync", deadline=400.0, linger=60.0)

    async def scenario() -> None:
        nodes = [build(folder, options) for folder in folders]
        for node, port in zip(nodes, ports, strict=True):
            node.settings = replace(node.settings, bind=f"{HERE}:{port}")
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 450)
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
    report = audit([read_statement(folder / "store") for folder in folders])
    print("\n".join(report.lines()), tally)
    assert report.passed
    assert (report.units, report.in_flight) == (3 * UNIT, 0)
    assert tally["lost"] > 0.2 * tally["packets"]
    print("balanced")


if __name__ == "__main__":
    main()
