"""The members of a run: one file, roster.toml, the same for all of them.

A member is a name, an address and the fingerprints of its keys. It is read again when it changes.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quiverfl.errors import QuiverError, suggest
from quiverfl.peer.accounts.disk import write_durably
from quiverfl.peer.link.identity import fingerprint, list_names, log_once, parse_certificate
from quiverfl.peer.link.wire import Hash, Name

ROSTER = "roster.toml"
DIALS_OUT = "dials-out:0"
"""The address of a member that cannot be called. It calls other members and fetches its shares."""


class _MemberEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Name
    address: Annotated[str, Field(pattern=r"^[^\s]+:\d+$")]
    keys: list[Hash]
    former: list[Hash] = []
    relay: bool = False


class _RosterFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    run: Name
    peer: list[_MemberEntry] = []


@dataclass(frozen=True)
class Member:
    """A member; its position in the roster is its client number."""

    name: str
    address: str
    keys: tuple[str, ...]
    former: tuple[str, ...] = ()  # dropped keys: what they signed stays signed
    relays: bool = False  # for members that only dial out, which it has offered

    @property
    def dials_out(self) -> bool:
        return self.address == DIALS_OUT


def check_relay(name: str, address: str, relays: bool) -> None:
    """Refuse a relay that cannot be called."""
    if relays and address == DIALS_OUT:
        raise QuiverError(
            f"{name!r} only dials out, so it cannot relay: a relay needs an address at which "
            "the others can call it."
        )


@dataclass(frozen=True)
class Roster:
    run: str
    members: tuple[Member, ...]

    @classmethod
    def read(cls, path: Path) -> Roster:
        try:
            content = _RosterFile.model_validate(read_toml(path))
        except ValidationError as problem:
            raise QuiverError(f"the roster {say_invalid(path, problem)}") from problem
        members = tuple(
            Member(m.name, m.address, tuple(m.keys), tuple(m.former), m.relay) for m in content.peer
        )
        names = [member.name for member in members]
        for name in names:
            if names.count(name) > 1:
                raise QuiverError(f"the roster {path} lists {name!r} twice.")
        for member in members:
            check_relay(member.name, member.address, member.relays)
        return cls(content.run, members)

    def write(self, path: Path) -> None:
        lines = [f"run = {json.dumps(self.run)}"]
        for member in self.members:
            lines += ["", "[[peer]]", f"name = {json.dumps(member.name)}"]
            lines.append(f"address = {json.dumps(member.address)}")
            lines.append(f"keys = {json.dumps(list(member.keys))}")
            if member.former:
                lines.append(f"former = {json.dumps(list(member.former))}")
            if member.relays:
                lines.append("relay = true")
        write_durably(path, ("\n".join(lines) + "\n").encode(), 0o644)

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    @property
    def relays(self) -> list[str]:
        """The members that relay for those that only dial out."""
        return [member.name for member in self.members if member.relays and member.keys]

    def number(self, name: str) -> int:
        """The client number."""
        return self.names.index(self.member(name).name)

    def member(self, name: str) -> Member:
        for member in self.members:
            if member.name == name:
                return member
        raise QuiverError(f"{name!r} is not in the roster; {suggest(name, self.names)}")

    def with_key(self, name: str, key: str, keep_old: bool = True) -> Roster:
        """Give a member a new key; the old one stays valid until it is dropped."""
        old = self.member(name)
        keys = (*(k for k in old.keys if keep_old and k != key), key)
        former = (*old.former, *(k for k in old.keys if k not in keys))
        changed = replace(old, keys=keys, former=former)
        return replace(self, members=tuple(changed if m == old else m for m in self.members))

    def after(self, before: Roster) -> Roster:
        """This roster as a running peer takes it: numbers stay, and who is missing is revoked."""
        missing = [m.name for m in before.members if m.name not in self.names]
        kept = [
            before.without_keys(n).member(n) if n in missing else self.member(n)
            for n in before.names
        ]
        new = [member for member in self.members if member.name not in before.names]
        return replace(self, members=(*kept, *new))

    def without_keys(self, name: str) -> Roster:
        """Admit a member no more; its number, its records and what it signed remain."""
        old = self.member(name)
        changed = replace(old, keys=(), former=(*old.former, *old.keys))
        return replace(self, members=tuple(changed if m == old else m for m in self.members))

    def identify(self, pem: bytes) -> str:
        """Find the member that a certificate, already verified by the authority, belongs to."""
        certificate = parse_certificate(pem)
        names = list_names(certificate)
        if len(names) != 1:
            raise QuiverError(f"a certificate for {names}: it must name one peer.")
        member = self.member(names[0])
        if not member.keys:
            raise QuiverError(f"{member.name!r} was revoked: the roster has no key for it.")
        if fingerprint(certificate) not in member.keys:
            raise QuiverError(f"the key of {member.name!r} is not the one in the roster.")
        return member.name


def say_invalid(path: Path, problem: ValidationError) -> str:
    """The error in a file, in one sentence: the first of pydantic's findings."""
    first = problem.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{path} does not say {where}: write it in."
    if first["type"] == "extra_forbidden":
        return f"{path}: unknown key {where}: leave it out."
    return f"{path}: {where} = {first['input']!r}: {first['msg'][:1].lower()}{first['msg'][1:]}."


LARGEST_TOML = 4 << 20
MOST_DOTS = 4096
"""In one line: the time to parse a dotted key grows with the square of its parts."""


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file of untrusted origin: bounded in time and depth."""
    try:
        if path.stat().st_size > LARGEST_TOML:
            raise QuiverError(
                f"{path} has more than {LARGEST_TOML >> 20} MiB: no file of a run is so long."
            )
        text = path.read_text("utf-8-sig")  # editors on Windows write a mark first
        if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
            raise QuiverError(f"{path} has a line of more than {MOST_DOTS} dots.")
        return tomllib.loads(text)
    except OSError as problem:
        raise QuiverError(f"cannot read {path}: {problem.strerror}.") from problem
    except UnicodeDecodeError as problem:
        raise QuiverError(f"{path} is not UTF-8: save it as UTF-8.") from problem
    except tomllib.TOMLDecodeError as problem:
        raise QuiverError(f"{path} is not valid TOML: {problem}.") from problem
    except RecursionError:
        raise QuiverError(f"{path} is not valid TOML: its arrays are nested too deep.") from None


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
                self.current, self._stamp = Roster.read(self._path).after(self.current), stamp
            self._problem = ""
        except (OSError, QuiverError) as problem:
            sentence = f"the roster is not read again: {problem}"
            self._problem = log_once(sentence, self._problem)
        return self.current
