"""tools/lines.py: sizes of folders, printed and gated by nothing."""

from __future__ import annotations

from pathlib import Path

import lines as tool


def test_files_and_lines_are_added_up_by_folder(tmp_path, capsys):
    for name, count in {
        "src/padless/ops/a.py": 70,
        "src/padless/ops/deeper/b.py": 5,
        "src/padless/nn/c.py": 100,
        "src/padless/formats.py": 3,
        "tests/ops/test_a.py": 11,
        "tests/test_b.py": 2,
        "setup.py": 1,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n" * count)
    (tmp_path / "src/padless/ops/a.cu").write_text("not Python\n")
    assert tool.main(tmp_path) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], int(row[-4]), int(row[-2])) for row in rows] == [
        ("nn", 1, 100),
        ("ops", 2, 75),
        ("(root", 1, 3),
        ("src/padless", 4, 178),
        ("tests", 2, 13),
        ("(root)", 1, 1),
    ]
    assert "(2 files below 60 lines)" in " ".join(rows[3])


def test_every_file_of_the_package_counts():
    listed = tool.counted(tool.ROOT)
    package = tool.ROOT / tool.PACKAGE
    assert {tool.ROOT / file for file in listed if file.is_relative_to(tool.PACKAGE)} == {
        path for path in package.rglob("*.py") if "__pycache__" not in path.parts
    }
    assert listed[Path("tools/lines.py")] == len((tool.ROOT / "tools/lines.py").read_text().splitlines())
