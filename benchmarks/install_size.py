"""What the light core costs on a device: MB on disk of trtpipe and all it requires, and seconds to import it.

    python benchmarks/install_size.py [--json]

Sizes are of the files that each package's own record lists, so it can run in any environment, a full one too.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys


def required(name: str) -> set[str]:
    """`name` and all it requires, without extras, as installed here."""
    from_name = [name]
    found: set[str] = set()
    while from_name:
        current = re.sub(r"[-_.]+", "-", from_name.pop()).lower()
        if current in found:
            continue
        try:
            requirements = importlib.metadata.requires(current) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or Python
        found.add(current)
        from_name += [re.split(r"[ ;<>=!~\[(]", r, maxsplit=1)[0] for r in requirements if "extra ==" not in r]
    return found


def megabytes(name: str) -> float:
    """MB (1,000,000 bytes) of the files the package installed, compiled bytecode aside."""
    files = importlib.metadata.files(name) or []
    paths = [f.locate() for f in files if not str(f).endswith(".pyc")]
    return sum(p.stat().st_size for p in paths if p.is_file()) / 1e6  # type: ignore[attr-defined]


def import_cpu_s(statement: str) -> float:
    """Processor seconds that a fresh interpreter takes for `statement`, its own start aside; best of 5."""
    measured = "import time; t = time.process_time(); {}; print(time.process_time() - t)"
    times = [
        float(
            subprocess.run(
                [sys.executable, "-c", measured.format(statement)], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(5)
    ]
    return min(times)


def main() -> None:
    """Print the table, or with --json one object."""
    sizes = {name: megabytes(name) for name in sorted(required("trtpipe"))}
    figures = {
        "python": sys.version.split()[0],
        "packages_mb": {n: round(s, 1) for n, s in sizes.items()},
        "total_mb": round(sum(sizes.values()), 1),
        "import_cpu_s": round(import_cpu_s("import trtpipe"), 3),
        "import_numpy_cpu_s": round(import_cpu_s("import numpy"), 3),
        "import_runner_cpu_s": round(import_cpu_s("import trtpipe.runtime.session"), 3),
    }
    if "--json" in sys.argv[1:]:
        print(json.dumps(figures))
        return
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{name:<24} {size:6.1f} MB")
    print(f"{'total':<24} {figures['total_mb']:6.1f} MB on disk")
    print(f"import trtpipe           {figures['import_cpu_s']:6.3f} s of processor time")
    print(f"import numpy             {figures['import_numpy_cpu_s']:6.3f} s of processor time")
    print(f"import trtpipe.runtime.session    {figures['import_runner_cpu_s']:6.3f} s of processor time")


if __name__ == "__main__":
    main()
