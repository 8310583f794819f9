import io
import tarfile

import pytest

from sbeval.corpora.archives import unpack
from sbeval.errors import UserError


def archive_of(*names: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarFile:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.type, member.linkname = 5 if kind == tarfile.REGTYPE else 0, kind, "/etc/passwd"
            archive.addfile(member, io.BytesIO(b"hello"))
    packed.seek(0)
    return tarfile.open(fileobj=packed)


@pytest.fixture(params=["with a filter", "Python before 3.11.4"])
def python(request, monkeypatch) -> None:
    if request.param != "with a filter":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


@pytest.mark.usefixtures("python")
def test_files_are_written_below_the_folder(tmp_path):
    unpack(archive_of("one", "two/three"), tmp_path / "new")
    assert (tmp_path / "new" / "two" / "three").read_text() == (tmp_path / "new" / "one").read_text() == "hello"


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize(
    "archive", [archive_of("fine", "../out"), archive_of("/out"), archive_of("link", kind=tarfile.SYMTYPE)]
)
def test_what_leads_out_of_the_folder_is_refused_and_nothing_is_written(tmp_path, archive):
    with pytest.raises(UserError, match="which is no file below its folder"):
        unpack(archive, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
