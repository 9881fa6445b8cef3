"""The members of a run: name, address, key fingerprints. One file, the same for all of them."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quiverfl.errors import QuiverError, nearest
from quiverfl.peer import identity
from quiverfl.peer.files import write_durably
from quiverfl.peer.wire import Hash, Name

ROSTER = "roster.toml"
DIALS_OUT = "dials-out:0"
"""The address of a member that nobody can call: it calls the others, and fetches its shares."""


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Name
    address: Annotated[str, Field(pattern=r"^[^\s]+:\d+$")]
    keys: list[Hash]
    former: list[Hash] = []


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    run: Name
    peer: list[_Line]


@dataclass(frozen=True)
class Member:
    """A peer; its place in the roster is its client number."""

    name: str
    address: str
    keys: tuple[str, ...]
    former: tuple[str, ...] = ()  # dropped: no longer let in, but what they signed stays signed

    @property
    def dials_out(self) -> bool:
        return self.address == DIALS_OUT


@dataclass(frozen=True)
class Roster:
    run: str
    members: tuple[Member, ...]

    @classmethod
    def read(cls, path: Path) -> Roster:
        try:
            content = _File.model_validate(tomllib.loads(path.read_text()))
        except OSError as problem:
            raise QuiverError(f"cannot read the roster {path}: {problem.strerror}.") from problem
        except (tomllib.TOMLDecodeError, ValidationError) as problem:
            raise QuiverError(f"the roster {path} cannot be understood: {problem}") from problem
        members = tuple(
            Member(m.name, m.address, tuple(m.keys), tuple(m.former)) for m in content.peer
        )
        known = [member.name for member in members]
        for name in known:
            if known.count(name) > 1:
                raise QuiverError(f"the roster {path} lists {name!r} twice.")
        return cls(content.run, members)

    def write(self, path: Path) -> None:
        lines = [f"run = {json.dumps(self.run)}"]
        for member in self.members:
            lines += ["", "[[peer]]", f"name = {json.dumps(member.name)}"]
            lines.append(f"address = {json.dumps(member.address)}")
            lines.append(f"keys = {json.dumps(list(member.keys))}")
            if member.former:
                lines.append(f"former = {json.dumps(list(member.former))}")
        write_durably(path, ("\n".join(lines) + "\n").encode(), 0o644)

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    def number(self, name: str) -> int:
        """The client number."""
        return self.names.index(self.member(name).name)

    def member(self, name: str) -> Member:
        for member in self.members:
            if member.name == name:
                return member
        raise QuiverError(f"{name!r} is not in the roster; {nearest(name, self.names)}")

    def with_key(self, name: str, key: str, keep_old: bool = True) -> Roster:
        """A new key for a member; the old one stays valid until it is dropped."""
        old = self.member(name)
        keys = (*(k for k in old.keys if keep_old and k != key), key)
        former = (*old.former, *(k for k in old.keys if k not in keys))
        changed = replace(old, keys=keys, former=former)
        return replace(self, members=tuple(changed if m == old else m for m in self.members))

    def without_keys(self, name: str) -> Roster:
        """A member that is let in no more; its place, its books and what it signed remain."""
        old = self.member(name)
        changed = replace(old, keys=(), former=(*old.former, *old.keys))
        return replace(self, members=tuple(changed if m == old else m for m in self.members))

    def identify(self, pem: bytes) -> str:
        """The member a certificate (already verified against the authority) belongs to."""
        certificate = identity.parse(pem)
        names = identity.names(certificate)
        if len(names) != 1:
            raise QuiverError(f"a certificate for {names}: it must name one peer.")
        member = self.member(names[0])
        if not member.keys:
            raise QuiverError(f"{member.name!r} was revoked: the roster has no key for it.")
        if identity.fingerprint(certificate) not in member.keys:
            raise QuiverError(f"the key of {member.name!r} is not the one in the roster.")
        return member.name


class LiveRoster:
    """The roster file, read again when it changes: members and keys can be added in mid-run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = path.stat().st_mtime_ns
        self.current = Roster.read(path)
        self._problem = ""

    def refresh(self) -> Roster:
        """The members as of now; a file that cannot be read at the moment changes nothing."""
        try:
            stamp = self._path.stat().st_mtime_ns
            if stamp != self._stamp:
                self.current, self._stamp = Roster.read(self._path), stamp
            self._problem = ""
        except (OSError, QuiverError) as problem:
            told = f"the roster is not read again: {problem}"
            self._problem = identity.told_once(told, self._problem)
        return self.current
