from dataclasses import replace

from harness.report import markdown


def test_says_the_verdict_first(make, slow, memory):
    """The heading is the verdict and the name of what was judged."""
    assert markdown.render(make(slow, memory)).startswith("## FAIL: stage1.business\\_mix\n")


def test_simulation_is_said(make, slow):
    """A simulated run says so before the first table."""
    assert "SIMULATED" in markdown.render(make(slow)).split("| gate")[0]


def test_worst_first(make, slow, memory, blind):
    """Rows and reasons stand in the order of severity, whatever the scenario's order."""
    told = markdown.render(make(memory, slow, blind))
    assert told.index("**INVALID** gpu") < told.index("**FAIL** p95")
    assert told.index("| p95\\_latency") < told.index("82.03 %")


def test_words_are_escaped(make, slow):
    """Pipes, HTML and markup in a reason are shown, not obeyed, and stay on one line."""
    nasty = replace(slow, why="a | b <script>alert(1)</script>\n# *x* [l](http://e) `c`")
    line = next(row for row in markdown.render(make(nasty)).splitlines() if "script" in row and row.startswith("- "))
    assert r"a \| b &lt;script&gt;alert(1)&lt;/script&gt; # \*x\* \[l\](http://e) \`c\`" in line


def test_every_row_of_a_table_has_its_columns(make, slow, memory, thin):
    """No cell breaks the table that it stands in."""
    nasty = replace(slow, gate="a|b", limit="x | y")
    told = markdown.render(make(nasty, memory, thin))
    table = told.split("### Gates")[1].split("###")[0].strip().splitlines()
    assert len({row.replace(r"\|", "").count("|") for row in table}) == 1


def test_500_gates_fit(make, slow, memory):
    """A report of 500 gates stays below 60 kB, keeps the failed ones, and counts what was left out."""
    gates = [replace(slow if n % 100 == 0 else memory, gate=f"gate_{n}", limit="limit " * 60) for n in range(500)]
    told = markdown.render(make(*gates))
    assert len(told.encode()) <= markdown.LIMIT_BYTES
    assert "more lines were left out here" in told
    assert all(f"**FAIL** gate\\_{n}:" in told for n in (0, 100, 200, 300, 400))


def test_the_cut_counts_bytes(make, slow):
    """The limit holds in bytes, not in characters."""
    gates = [replace(slow, gate=f"gate_{n}", why="ü" * 400) for n in range(500)]
    assert 50_000 < len(markdown.render(make(*gates)).encode()) <= markdown.LIMIT_BYTES
