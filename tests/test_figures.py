"""The page on the mathematics shows what the functions compute today: its pictures are those that
the script draws, readable where they are shown, and every link of the documentation leads to a
file, a heading or a function that exists.  Each check is also run on a planted fault."""

import ast
import re
from xml.etree import ElementTree

import pytest
from conftest import ROOT, load_script

PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("README.md")])
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
CODE = re.compile(r"`([A-Za-z_][A-Za-z0-9_]*)(?:\(\))?`")


@pytest.fixture(scope="module")
def figures():
    return load_script(ROOT / "benchmarks" / "figures.py")


def prose(path):
    """The page without code blocks, whose brackets are no links."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def headings(path):
    """Anchors as forges make them: lower case, spaces to dashes, other signs dropped."""
    titles = re.findall(r"^#+ (.+)$", prose(path), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def defined(path):
    """Names of a module's top level."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {t.id for t in targets if isinstance(t, ast.Name)}
    return found


def broken(page, text):
    """What is wrong with the links of a page, as sentences."""
    wrong = []
    for words, target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            wrong.append(f"{target}: no such file")
            continue
        if anchor and path.suffix == ".md" and anchor not in headings(path):
            wrong.append(f"{target}: no such heading")
        code = CODE.fullmatch(words)
        if code and path.suffix == ".py" and code[1] not in defined(path):
            wrong.append(f"{target}: defines no {code[1]}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Every relative link of the documentation exists, and every function named by one."""
    assert broken(page, prose(page)) == []


def test_a_link_that_leads_nowhere_is_found():
    """The check above fails on a missing file, heading and function, and passes their like."""
    page = ROOT / "docs" / "theory.md"
    module = "../kernel_contracts/bounds/token.py"
    assert broken(page, f"[`tv_from_drift`]({module}) [x](#many-slices) [y](https://a.b/c)") == []
    assert len(broken(page, f"[`no_such_bound`]({module})")) == 1
    assert len(broken(page, "[x](../kernel_contracts/bounds/tokens.py)")) == 1
    assert len(broken(page, "[x](#no-such-heading) ![y](img/none.svg)")) == 2


def test_every_module_of_bounds_is_explained():
    """Theory links at least one function of each module of bounds: no idea goes unexplained."""
    text = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
    for module in (ROOT / "kernel_contracts" / "bounds").glob("[a-z]*.py"):
        assert f"bounds/{module.name}" in text, module.name


def test_pictures_are_those_that_the_script_draws(figures):
    """Committed files and drawn files agree to the last byte; nothing is left over or unused."""
    committed = {path.stem for path in figures.FOLDER.glob("*.svg")}
    assert committed == set(figures.FIGURES)
    page = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
    for name, draw in figures.FIGURES.items():
        assert (figures.FOLDER / f"{name}.svg").read_text(encoding="utf-8") == draw(), name
        assert page.count(f"](img/{name}.svg)") == 1, name


def test_pictures_follow_the_functions(figures, monkeypatch):
    """A bound that changes changes its picture: nothing is drawn from a copied number."""
    before = figures.token()
    original = figures.b.tv_from_drift
    monkeypatch.setattr(figures.b, "tv_from_drift", lambda d: original(d) * 0.9)
    assert figures.token() != before


SVG = "{http://www.w3.org/2000/svg}"


def unreadable(root, width):
    """Why a picture cannot be read, as sentences. Opaque paper lies behind dark ink, so that a dark
    page does not swallow the text; text has 12 pixels or more and stays on the paper."""
    tags = [child.tag.removeprefix(SVG) for child in root]
    if tags[:3] != ["title", "desc", "rect"]:
        return ["no name, no description or no paper"]
    wrong = []
    if root[2].attrib["fill"] != "#fff" or float(root[2].attrib["width"]) < width - 1:
        wrong.append("the paper is not white or does not cover the picture")
    for text in root.iter(SVG + "text"):
        size = float(text.attrib["font-size"])
        # 0.62 em a letter: DejaVu, the widest of the usual sans-serif fonts, on texts like these.
        long = 0.62 * size * len(text.text)
        share = {"end": 1.0, "middle": 0.5}.get(text.attrib.get("text-anchor", ""), 0.0)
        left = float(text.attrib["x"]) - share * long
        if size < 12:
            wrong.append(f"too small: {text.text}")
        if left < 0 or left + long > width:
            wrong.append(f"leaves the paper: {text.text}")
    return wrong


def test_pictures_can_be_read(figures):
    """Every picture is valid XML and readable on any page."""
    for path in figures.FOLDER.glob("*.svg"):
        assert unreadable(ElementTree.parse(path).getroot(), figures.WIDTH) == [], path.name


def test_an_unreadable_picture_is_found(figures):
    """Each fault alone is found: small text, text over the edge, no paper."""
    good = figures.paper("name", "what it shows", 100, [])
    small = figures.paper("name", "told", 100, [figures.text(9, 9, "x", font_size=9)])
    wide = figures.paper("name", "told", 100, [figures.text(700, 9, "over the edge")])
    clear = good.replace('fill="#fff"', 'fill="none"')
    pictures = [ElementTree.fromstring(svg) for svg in (good, small, wide, clear)]
    found = [unreadable(root, figures.WIDTH) for root in pictures]
    assert [len(wrong) for wrong in found] == [0, 1, 1, 1]
