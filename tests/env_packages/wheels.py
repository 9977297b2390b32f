"""Wheels for tests, made without a network."""

import hashlib
import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str = "tinydep", version: str = "1.0", files: dict[str, str] | None = None) -> Path:
    """A wheel of one module, or of the files given."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    held = files if files is not None else {f"{name}.py": f"VERSION = {version!r}\n"}
    held = held | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in held) + f"{info}/RECORD,,\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in (held | {f"{info}/RECORD": record}).items():
            archive.writestr(zipfile.ZipInfo(file, (2020, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
    return path


def lock_of(*wheels: Path) -> str:
    """A lock that pins these wheels."""
    lines = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        lines.append(f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    return "".join(lines)
