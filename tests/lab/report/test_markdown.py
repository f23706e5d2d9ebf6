"""Tables whose cells may hold anything."""

from foveate.lab.report.markdown import markdown_table, titled


def test_no_cell_ends_its_table():
    lines = markdown_table([("method", "score"), ('`lte:file="a | b`\n# H.safetensors"`', "1.0")]).splitlines()
    assert lines == ["| method | score |", "|---|--:|", '| `lte:file="a \\| b` # H.safetensors"` | 1.0 |']
    row = {"device": "cpu", "versions": {"torch": "2", "transformers": "5"}, "commit": "abc"}
    assert titled("a\nb", [row], "T") == "a b (cpu; torch 2, transformers 5; commit abc):\n\nT"
