"""Checks of a page that users open: valid, complete, accessible, and usable at any width."""

import re
from html.parser import HTMLParser

VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
SVG_NAMESPACE = "http://www.w3.org/2000/svg"
TEXT_COLORS = ("text", "muted", "accent", "good", "bad", "warn")
WIDTHS = (390, 768, 1024, 1440)


class Page(HTMLParser):
    """The tags of a page with their attributes, its text, and what is wrong with its structure."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.open, self.wrong = [], "", [], []
        self.feed(html)
        self.close()
        self.wrong += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.wrong.append(f"</{tag}> at {self.getpos()} closes {self.open[-1:]}")

    def handle_data(self, data):
        self.text += data

    def values(self, name):
        """The values of an attribute, in the order of the page."""
        return [attributes[name] for _, attributes in self.tags if name in attributes]


def check(html):
    """Check the source of a page: structure, ids, links, headings of tables, contrast."""
    page = Page(html)
    assert not page.wrong
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in page.values("href")} <= set(ids)
    assert all(link.startswith("#") for link in page.values("href"))
    assert not page.values("src")
    assert "@import" not in html
    assert not re.search(r"url\(|https?://", html.replace(SVG_NAMESPACE, ""))
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")
    assert [tag for tag, _ in page.tags].count("h1") == 1
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in policy
    for scheme in _schemes(html):
        for back in ("page", "card"):
            for name in TEXT_COLORS:
                assert _contrast(scheme[name], scheme[back]) >= 4.5, (name, back)
        for back in ("added", "removed"):
            assert _contrast(scheme["text"], scheme[back]) >= 4.5, back


def check_in_browser(page):
    """Check a loaded page: no sideways scrolling, dark mode, print, sorting by keyboard."""
    backgrounds = set()
    for width in WIDTHS:
        for scheme in ("light", "dark"):
            page.resize(width)
            page.prefer(scheme)
            assert page.run("document.documentElement.scrollWidth") <= width
            backgrounds.add(page.run("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    page.prefer("dark", media="print")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.resize(720)  # about that of A4
    assert page.run("document.documentElement.scrollWidth") <= 720
    page.prefer("light")
    page.resize(WIDTHS[-1])

    page.run("document.querySelector('thead button').focus()")
    for order in ("ascending", "descending"):
        page.press("Enter", "\r")
        assert page.run("document.activeElement.parentElement.getAttribute('aria-sort')") == order
    page.press("Tab")
    assert page.run("document.activeElement.closest('thead') !== null")
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.logged == []


def _schemes(html):
    """The colours of the light and of the dark scheme, by name."""
    blocks = re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    schemes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", block)) for block in blocks]
    assert len(schemes) == 3  # light, dark and print
    return schemes


def _contrast(one, other):
    """The contrast ratio of two colours as WCAG defines it."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(color):
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
