"""What of two compilations of one graph is compared, and how a difference is said."""

import pytest

from ipex_inductor.aot_cache.graph_files.comparing import compare

pytestmark = pytest.mark.unit

KEPT = {
    "ab/cabc.py": b"# AOT ID: ['0_inference']\nimport torch\n",
    "cd/ccde.main.cpp": b"// made\n#include <a.h>\nx = 1;\n",
    "cd/ccde.main.so": b"one",
    "fxgraph/f": b"pickle",
}


def test_comments_objects_pickles_and_names_are_not_compared():
    built = {
        "xy/cxyz.py": b"# AOT ID: ['7_inference']\nimport torch\n",  # named by its content
        "cd/ccde.main.cpp": b"// made elsewhere\n#include <a.h>\nx = 1;\n",
        "cd/ccde.main.so": b"two",
        "fxgraph/g": b"another",
    }
    found = compare("0123456789abcdef", KEPT, built)
    assert (found.sources, found.differing) == (2, [])
    assert str(found) == "0123456789ab comes out the same, 2 sources"


def test_a_comment_of_one_language_is_none_of_another():
    kept = {"a.py": b"x = (y\n// 2)\n", "b.cpp": b"#  define A 1\n"}
    built = {"a.py": b"x = (y\n// 3)\n", "b.cpp": b"#  define A 2\n"}
    assert len(compare("0" * 64, kept, built).differing) == 2


def test_what_is_built_later_is_no_difference():
    built = {name: code for name, code in KEPT.items() if not name.endswith(".py")}
    assert compare("0" * 64, KEPT, built).differing == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (b"#include <a.h>\nx = 2;\n", "'x = 2;' here, 'x = 1;' there"),
        (b"#include <b.h>\nx = 1;\n", "'#include <b.h>' here, '#include <a.h>' there"),
        (b"#include <a.h>\nx = 1;\ny;\n", "'y;' here, '' there"),
        (b"#include <a.h>\r\nx = 1;\n", "its line ends"),
    ],
)
def test_a_difference_is_said_by_its_first_line(code, said):
    found = compare("0" * 64, KEPT, {**KEPT, "cd/ccde.main.cpp": code})
    assert found.differing == [f"cd/ccde.main.cpp: {said}"]
    assert "comes out otherwise" in str(found)


def test_it_is_held_against_the_source_that_is_most_like_it():
    kept = {**KEPT, "ab/tried.cpp": b"int main() {}\n", "ab/other.cpp": b"#include <z.h>\n"}
    built = {"cd/ccde.main.cpp": b"#include <a.h>\nx = 2;\n"}
    assert compare("0" * 64, kept, built).differing == [
        "cd/ccde.main.cpp: 'x = 2;' here, 'x = 1;' there"
    ]


def test_a_source_that_the_entry_lacks():
    (said,) = compare("0" * 64, {}, {"ab/cabc.py": b"import torch\n"}).differing
    assert said == "ab/cabc.py: 'import torch' here, '' there"
