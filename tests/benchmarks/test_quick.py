"""Which tests `make quick` chooses."""

from tools.quick import folders_to_run, lines_of_diff

DIFF = """diff --git a/bridge/lens.py b/bridge/lens.py
index 1..2 100644
--- a/bridge/lens.py
+++ b/bridge/lens.py
@@ -3 +3,2 @@ def f():
-old
+new
+more
@@ -10,2 +11,0 @@
-gone
-gone, too
diff --git a/tests/lens/test_lens.py b/tests/lens/test_lens.py
@@ -7,0 +8 @@
+new
"""


def test_lines_are_those_of_the_revision_before():
    assert lines_of_diff(DIFF) == {"bridge/lens.py": {3, 10, 11}, "tests/lens/test_lens.py": {7}}


def test_rooms_are_tested_by_their_folders():
    changed = ["bridge/hooks/names.py", "bridge/lens.py", "adapters/proofs/scores.py"]
    assert folders_to_run(changed) == ["tests/hooks", "tests/lens", "tests/adapters/proofs"]
    assert folders_to_run(["adapters/norms.py"]) == ["tests/adapters"]
