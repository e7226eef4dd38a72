"""What a user sees when something breaks: `python tests/docs/when_it_fails.py` prints it, `--write` updates the pages.

Two ranks train, and rank 1 raises, gets stuck or is killed in its second forward; what rank 0 then says goes into the
block of each page that is marked so. test_when_it_fails.py looks whether the pages are up to date.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
PAGES = (_ROOT / "README.md", _ROOT / "docs" / "errors.md")
_TRAINING = """\
import os, signal, sys, threading, torch, pypipe

class Block(torch.nn.Linear):
    def forward(self, x):
        if sys.argv[1] != "nothing" and len(calls) == 1:
            fail[sys.argv[1]]()
        calls.append(x)
        return super().forward(x)

def misfit():
    wait_until_rank_0_waits()
    raise ValueError("these two do not fit")

def die():
    wait_until_rank_0_waits()
    os.kill(os.getpid(), signal.SIGKILL)

def wait_until_rank_0_waits():  # so that what it says is the same each time
    hub, place = schedule._pipeline._running.connection.hub, None
    while place != (pypipe.program.Kind.B.order, 1):
        reports = hub.ask(2, pypipe._core.WaitPolicy(1.0))
        now = next((report.status.now for report in reports if report.status.rank == 0), None)
        place = now and (now.kind, now.microbatch)

fail = {"raise": misfit, "stick": threading.Event().wait, "kill": die}
calls = []
rank = int(os.environ["RANK"])
block = Block(4, 4) if rank == 1 else torch.nn.Linear(4, 4)
stage = pypipe.PipelineStage(block, rank, 2, torch.device("cpu"))
schedule = pypipe.Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss, timeout=3)
x = torch.ones(8, 4)
schedule.step(x, target=x)
"""


def _run(folder: Path, fault: str) -> str:
    """The last error of rank 0."""
    (folder / "train.py").write_text(_TRAINING)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYPIPE_RECORD_DIR": str(folder / "records"),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "train.py", fault],
            cwd=folder,
            env={**os.environ, **together, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        text = ranks[0].communicate(timeout=120)[1]
        if fault != "stick":  # which goes on for ever
            ranks[1].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return text[text.rindex("\npypipe.errors.") + len("\npypipe.errors.") :]


def _neat(text: str, folder: Path) -> str:
    """Paths as short as can be, and of a traceback the user's own part."""
    text = text.replace(f"{folder}{os.sep}", "")
    for name in ("purelib", "stdlib"):
        text = text.replace(f"{sysconfig.get_path(name)}{os.sep}", "")
    text = re.sub(r'"[^"\n]*/(pypipe|torch)/', r'"\1/', text)
    text = re.sub(r'(  File "(pypipe|torch)/.*\n(    .*\n)+)+', "  ...\n", text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def outputs() -> dict[str, str]:
    """For each kind of marked block, what the program prints."""
    found = {}
    for name, fault in (("raises", "raise"), ("sticks", "stick"), ("dies", "kill")):
        with tempfile.TemporaryDirectory(prefix="pypipe-fails-") as made:
            folder = Path(made)
            found[name] = _neat(_run(folder, fault), folder)
            if fault == "raise":
                command = [sys.executable, "-P", "-m", "pypipe", "show", "--record", "records"]
                shown = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=120)
                found["record"] = _neat(shown.stdout, folder)
    return found


def blocks(text: str) -> dict[str, str]:
    """The marked blocks of a page."""
    return dict(re.findall(r"<!-- when it fails: (\w+) -->\n```text\n(.*?)\n```", text, flags=re.DOTALL))


def masked(text: str) -> list[str]:
    """The lines, without what differs from run to run: their order, spaces, times and numbers of lines."""
    return sorted(re.sub(r" +", " ", re.sub(r"line \d+|-?\d+\.\d+", "#", line)) for line in text.splitlines())


def main() -> None:
    printed = outputs()
    if sys.argv[1:] != ["--write"]:
        print("\n\n".join(f"# {name}\n{text}" for name, text in printed.items()))
        return
    for page in PAGES:
        text = page.read_text()
        for name in blocks(text):
            mark = f"<!-- when it fails: {name} -->\n```text\n"
            start = text.index(mark) + len(mark)
            text = text[:start] + printed[name] + text[text.index("\n```", start) :]
        page.write_text(text)


if __name__ == "__main__":
    main()
