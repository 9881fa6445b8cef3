"""`quiver run` without what only POSIX has: its modules, functions of `os`, signals and paths.

A process of its own imports the libraries, then loses everything that Windows lacks, and says
that it is Windows. Windows' own `msvcrt`, which locks files, is played by a few lines.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = '''
import importlib.abc, os, signal, sys, types

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
print("done", sorted(set(MODULES) & set(sys.modules)))
'''


def test_run_report_and_export_need_nothing_of_posix(tmp_path: Path) -> None:
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
