"""Run the containers of examples/kubernetes without a cluster, as OpenShift's restricted-v2 would.

A pod has a process namespace and a mount namespace of its own: the root is read-only, `/tmp` and
`/dev/shm` are empty and writable, the user id is random, in group 0, without capabilities, and no
program gives any back. What differs from a cluster: the network is the machine's, the image's files
are those that the steps of the Containerfile make here, and there is no seccomp profile.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.manifests import FOLDER

ROOT = Path(__file__).parents[2]
RANDOM_UID = 1000660000
_BUILDER = ["setpriv", "--reuid=1001", "--regid=0", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]


def why_not() -> str | None:
    """Return why pods cannot be run here, or None."""
    if os.geteuid() != 0:
        return "only root can make namespaces here"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "setpriv", "--reuid=1", "--bounding-set=-all", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip() or None if tried.returncode else None


def build_image(folder: Path) -> Path:
    """Carry out the Containerfile's COPY and wheel steps as its user; dependencies are this environment's."""
    text = (FOLDER / "Containerfile").read_text().replace("\\\n", "")
    source, app, wheels, site = (folder / name for name in ("src", "app", "wheels", "site"))
    for made in (folder, source, app, wheels, site):
        made.mkdir(exist_ok=True)
    places = {"/tmp/src/": source, "/opt/app-root/src/": app}
    for copied in re.findall(r"^COPY --chown=1001:0 (.*)$", text, re.MULTILINE):
        *names, target = copied.split()
        place = next(
            place / target[len(prefix) :] for prefix, place in places.items() if target.startswith(prefix)
        )
        for name in names:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, place, symlinks=True, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / name, place)
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            os.chown(path, 1001, 0)
            path.chmod(0o775 if path.is_dir() else 0o664)
    (line,) = re.findall(r"^RUN (python3 -m pip wheel .*)$", text, re.MULTILINE)
    words = line.replace("/tmp/wheels", str(wheels)).replace("/tmp/src", str(source)).split()
    _build(folder, [*words[1:], "--no-build-isolation", "--quiet", "--no-cache-dir"])
    (wheel,) = wheels.glob("ckpt_storage-*.whl")
    _build(
        folder,
        ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)],
    )
    return folder


def _build(folder: Path, arguments: Sequence[str]) -> None:
    """Run Python as the Containerfile's user, who may write into `folder` alone."""
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder)}
    command = [*_BUILDER, "env", "-i", *(f"{name}={value}" for name, value in variables.items())]
    lines = [
        *_hide_all_but([folder], writable=True),
        f"exec {shlex.join([*command, sys.executable, *arguments])}",
    ]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", "\n".join(lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout


def _hide_all_but(folders: Sequence[Path], writable: bool = False) -> list[str]:
    """Return commands that empty /tmp, /root and /home but for these folders and this Python, and lock the root."""
    tops = ("/tmp", "/root", "/home")
    python = [Path(os.path.realpath(prefix)) for prefix in (sys.prefix, sys.base_prefix)]
    link = Path(sys.prefix)  # as programs name it
    lines = ["set -e", "mount --make-rprivate /", "mount --bind / /mnt"]
    lines += [f"mount -t tmpfs -o mode={'0777' if top == '/tmp' else '0755'} tmpfs {top}" for top in tops]
    for path in (*folders, *python):
        if any(path.is_relative_to(top) for top in tops):
            shown = shlex.quote(str(path))
            lines += [f"mkdir -p {shown}", f"mount --bind /mnt{shown} {shown}"]
            if not (writable and path in folders):
                lines.append(f"mount -o remount,bind,ro {shown}")
    if link.is_symlink():
        lines += [f"mkdir -p {shlex.quote(str(link.parent))}", f"ln -s {python[0]} {shlex.quote(str(link))}"]
    return [*lines, "umount /mnt", "mount -o remount,bind,ro /"]


def image_variables() -> dict[str, str]:
    """Return the variables of the image."""
    (line,) = re.findall(r"^ENV (.*)$", (FOLDER / "Containerfile").read_text(), re.MULTILINE)
    return dict(word.split("=", 1) for word in line.split())


@dataclass
class Pod:
    """A container's process."""

    unshare: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the container's first process, as the kubelet does."""
        pid = self.unshare.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(child), number)

    def wait_for(self, text: str, timeout_s: float = 240) -> None:
        deadline_s = time.monotonic() + timeout_s
        while text not in self.text:
            assert self.unshare.poll() is None, f"it ended before {text!r}: {self.text[-3000:]}"
            assert time.monotonic() < deadline_s, f"no {text!r} within {timeout_s} s: {self.text[-3000:]}"
            time.sleep(0.05)

    def status(self, timeout_s: float) -> int:
        """Wait for the end of the container."""
        try:
            return self.unshare.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {timeout_s} s: {self.text[-3000:]}") from None


@contextlib.contextmanager
def pod(
    image: Path, command: Sequence[str], variables: Mapping[str, str], hosts: Sequence[str], output: Path
) -> Iterator[Pod]:
    """Run a container in a pod of its own; it is killed at the end.

    Args:
        hosts: names that lead to this machine, as a headless service's do to its pods.
    """
    lines = [
        *_hide_all_but([image]),
        "mount -t tmpfs -o mode=0777,size=1g tmpfs /dev/shm",
        f"echo 127.0.0.1 localhost {' '.join([os.uname().nodename, *hosts])} > /dev/shm/hosts",
        "mount --bind /dev/shm/hosts /etc/hosts",
        "mount -t proc proc /proc",
        f"cd {shlex.quote(str(image / 'app'))}",
    ]
    given = {
        "PATH": f"{image / 'site' / 'bin'}:{Path(sys.prefix) / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": str(image / "site"),
        **image_variables(),
        **variables,
    }
    dropped = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--clear-groups"]
    user = ["setpriv", f"--reuid={RANDOM_UID}", "--regid=0", *dropped]
    started = [*user, "env", "-i", *(f"{name}={value}" for name, value in given.items()), *command]
    lines.append(f"exec {shlex.join(started)}")
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "sh", "-c", "\n".join(lines)]
    with open(output, "wb") as file:
        process = subprocess.Popen(unshare, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield Pod(process, output)
    finally:
        process.kill()
        process.wait()
