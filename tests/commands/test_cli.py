"""The `pypipe` command: what it offers, what it refuses, and that saying so costs no time."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

MODULE = [sys.executable, "-m", "pypipe"]


def run(*arguments: str | Path, command: list[str] = MODULE, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs pypipe in a folder from which only the installed package can be imported."""
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def test_help_lists_every_command(tmp_path: Path) -> None:
    result = run("--help", cwd=tmp_path)
    assert result.returncode == 0
    assert {"demo", "bench", "doctor", "plan", "show"} <= set(re.findall(r"^  (\w+)  ", result.stdout, re.MULTILINE))


@pytest.mark.parametrize("command", ["demo", "bench", "doctor", "plan"])
def test_each_command_explains_its_options(command: str, tmp_path: Path) -> None:
    result = run(command, "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "--json" in result.stdout


def test_the_version_is_the_installed_package_s(tmp_path: Path) -> None:
    result = run("--version", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.split()[-1] == version("pypipe")


def test_the_script_and_the_module_are_one_command(tmp_path: Path) -> None:
    script = [str(Path(sys.executable).with_name("pypipe"))]
    assert run("--help", cwd=tmp_path).stdout == run("--help", command=script, cwd=tmp_path).stdout


def test_the_command_line_is_read_without_importing_torch(tmp_path: Path) -> None:
    program = (
        "import sys, pypipe.commands.demo.run\n"
        "from pypipe.commands.cli import main\n"
        "for line in (['--help'], *([name, '--help'] for name in main.list_commands(None))):\n"
        "    try: main(line)\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = run(command=[sys.executable, "-c", program], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_is_no_command_is_not_offered(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert not {"launch", "cli", "conventions"} & set(re.findall(r"^  (\w+)", done.stdout, re.MULTILINE))
    assert run("launch", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--microbatches", "0"], "--microbatches is 0: give at least 1"),
        (["--stages", "0"], "--stages is 0: give at least 1"),
        (["--steps", "-3"], "--steps is -3: give at least 1"),
        (["--seed", "-1"], "--seed is -1: give a number from 0"),
        (["--width", "50"], "give a multiple of 16"),
        (["--stages", "5", "--blocks", "4"], "lower --stages, or give --blocks 5"),
        (["--schedule", "zvb"], "no schedule is called 'zvb'; did you mean 'zbv'?"),
        (["--schedule", "dualpipe", "--stages", "3"], "dualpipe needs an even number of ranks"),
        (["--microbatches", "64"], "lower --microbatches, or give --batch 64"),
        (["--trace", "step.png"], "--trace is step.png: give a file that ends in .json, .html, .svg"),
        (["--trace", "missing/step.svg"], "cannot write missing/step.svg: give --trace a file that can be written"),
        (["--text", "missing.txt"], "give --text a readable file"),
        (["--text", "."], "give --text a readable file"),
        (["--text", "short.txt"], "give a longer file, or lower --context"),
        (["--text", "empty.txt"], "give a longer file, or lower --context"),
        (["--text", "binary.txt"], "not UTF-8 at byte 4: give --text a UTF-8 file"),
    ],
)
@pytest.mark.parametrize("mode", [[], ["--json"]])
def test_bad_input_is_answered_by_one_line_with_the_remedy(
    arguments: list[str], remedy: str, mode: list[str], tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("x" * 64)  # one short of the default context and the character after it
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"text\xff\xfe" + bytes(200))
    result = run("demo", *arguments, *mode, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert remedy in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--steps", "1.5"], ["--stages", "many"], ["--depth", "3"]], ids=lambda each: each[0]
)
def test_options_that_cannot_be_read_end_with_exit_code_2(arguments: list[str], tmp_path: Path) -> None:
    result = run("demo", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert arguments[0] in result.stderr
    assert "Traceback" not in result.stderr
