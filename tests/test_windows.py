"""`quiver run` without what only POSIX, or only Linux, has: modules, functions of `os`, signals.

A process of its own imports the libraries, then loses everything that Windows, or macOS, lacks, and
says that it is that. Windows' own `msvcrt`, which locks files, and its `kernel32`, which knows of
processes, are played by a few lines.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SWEEP = """
methods = ["local", "fedavg"]
seeds = [0]
[base.data]
name = "digits"
clients = 4
samples_per_client = 12
[base.model]
hidden = [4]
[base.topology]
sampled = 2
[base.run]
rounds = 1
threads = 1
"""
SCRIPT = '''
import ctypes, importlib.abc, json, os, shutil, signal, socket, sys, types

import matplotlib.figure, numpy, pandas, pyarrow.parquet, pydantic, rich.progress, safetensors.torch
import scipy.sparse, scipy.stats, sklearn.datasets, torch, torch._dynamo, typer.testing

MODULES = """fcntl resource pwd grp termios tty pty syslog posix readline nis spwd crypt
    _posixsubprocess _posixshmem ossaudiodev""".split()
FUNCTIONS = """fork forkpty getuid geteuid getgid getegid setuid setgid getgroups getpgid killpg
    setsid getsid sched_getaffinity sched_setaffinity uname chown lchown fchown fchmod mkfifo mknod
    nice wait3 wait4 pread pwrite posix_fadvise sync getloadavg sysconf statvfs fstatvfs
    openpty ttyname ctermid posix_spawn""".split()
SIGNALS = "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGQUIT SIGALRM SIGCHLD SIGPIPE SIGTSTP SIGWINCH".split()


class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
for name in MODULES:
    sys.modules.pop(name, None)
for name in FUNCTIONS:
    if hasattr(os, name):
        delattr(os, name)
for name in SIGNALS:
    if hasattr(signal, name):
        delattr(signal, name)
for name in ("MADV_DONTNEED", "madvise"):
    if hasattr(__import__("mmap"), name):
        delattr(__import__("mmap"), name)
if hasattr(socket, "AF_UNIX"):
    del socket.AF_UNIX


def kill(process, number):
    raise AssertionError(f"os.kill({process}, {number}) ends a process of Windows, or sends Ctrl-C")


class Kernel:
    """One other process, 4321, is there; 4322 is somebody else's."""

    def __init__(self, name, use_last_error):
        assert name == "kernel32" and use_last_error

    def OpenProcess(self, access, inherit, process):
        ctypes.get_last_error = lambda: 5 if process == 4322 else 87
        return process if process in (4321, os.getpid()) else 0

    def GetExitCodeProcess(self, handle, code):
        code._obj.value = 259

    def CloseHandle(self, handle):
        pass


os.kill, ctypes.WinDLL = kill, Kernel
held = set()
msvcrt = types.ModuleType("msvcrt")
msvcrt.LK_NBLCK, msvcrt.LK_UNLCK = 2, 0
msvcrt.locking = lambda handle, mode, count: held.add(handle)
sys.modules["msvcrt"] = msvcrt
sys.platform = "win32"
os.name = "posix"  # paths stay those of this machine

from quiverfl.cli.main import app

refused = typer.testing.CliRunner().invoke(app, ["peer", "init", "peers"])
assert refused.exit_code and "needs Linux or macOS" in str(refused.exception), refused
for command in COMMANDS:
    found = typer.testing.CliRunner().invoke(app, command)
    if found.exit_code:
        import traceback

        traceback.print_exception(*found.exc_info)
        sys.exit(found.output)
assert held, "the run folder was not locked"
from quiverfl.support.locks import is_alive

# A run that another process writes is seen by its lock, and that process is left alone.
shutil.copytree("run", "going")
os.remove("going/summary.json")
for process, state in ((4321, "running"), (4323, "interrupted")):
    with open("going/.lock", "w") as lock:
        json.dump({"pid": process, "host": socket.gethostname()}, lock)
    found = typer.testing.CliRunner().invoke(app, ["ls", "going", "--json"])
    assert state in found.output, found.output
assert [is_alive(process) for process in (os.getpid(), 4321, 4322, 4323)] == [True] * 3 + [False]
print("done", sorted(set(MODULES) & set(sys.modules)))
'''


def test_run_report_and_export_need_nothing_of_posix(tmp_path: Path) -> None:
    (tmp_path / "few.toml").write_text(SWEEP, encoding="utf-8")
    commands = [
        ["run", "quickstart", "--set", "run.rounds=2", "--out", "run", "--quiet"],
        ["resume", "run", "--quiet"],
        ["compare", "quickstart", "--methods", "local,fedavg", "--set", "run.rounds=1"]
        + ["--set", "data.unseen=2", "--out", "both", "--quiet"],
        ["report", "both", "--out", "both.html"],
        ["export", "run", "--client", "0", "--out", "client.safetensors"],
        ["run", "quickstart", "--set", "model.name=lenet5", "--set", "model.hidden="]
        + [
            "--set",
            "data.augment=crop_flip",
            "--set",
            "run.rounds=1",
            "--out",
            "images",
            "--quiet",
        ],
        ["partition", "show", "--data", "digits", "--clients", "5"],
        ["data"],
        ["sweep", "few.toml", "--out", "few", "--quiet"],
        ["show", "run"],
    ]
    script = tmp_path / "as_windows.py"
    script.write_text(SCRIPT.replace("COMMANDS", repr(commands)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "done []"
    assert (tmp_path / "run" / "summary.json").is_file()
    assert (tmp_path / "both.html").is_file()


MACOS = '''
import ctypes, os, sys

import matplotlib.figure, torch, typer.testing

FUNCTIONS = "sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate memfd_create pipe2"
for name in FUNCTIONS.split():
    if hasattr(os, name):
        delattr(os, name)


class Library(ctypes.CDLL):
    """The C library, which has no mallopt."""

    def __getattr__(self, name):
        if name in ("mallopt", "prctl", "malloc_trim"):
            raise AttributeError(name)
        return super().__getattr__(name)


def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(f"macOS has no {arguments[0]}")


ctypes.CDLL = Library
sys.platform = "darwin"
sys.addaudithook(watch)

from quiverfl.cli.main import app

for command in COMMANDS:
    found = typer.testing.CliRunner().invoke(app, command)
    if found.exit_code:
        import traceback

        traceback.print_exception(*found.exc_info)
        sys.exit(found.output)
'''


def test_run_and_peers_begin_without_what_only_linux_has(tmp_path: Path) -> None:
    commands = [
        ["run", "quickstart", "--set", "run.rounds=1", "--out", "run", "--quiet"],
        ["report", "run", "--out", "run.html"],
        ["peer", "certs", "init", "keys", "--run", "few", "--peer", "one=127.0.0.1:7000"],
    ]
    script = tmp_path / "as_macos.py"
    script.write_text(MACOS.replace("COMMANDS", repr(commands)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run.html").is_file()
