"""HTML and SVG from Python, escaped because they are built as a tree; a page that may load nothing."""

from xml.etree.ElementTree import Element, tostring

Content = Element | str


def node(tag: str, *content: Content, **attributes: str) -> Element:
    """An element; `class_` is the attribute `class`, `aria_label` is `aria-label`."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    for part in content:
        if not isinstance(part, str):
            made.append(part)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + part
        else:
            made.text = (made.text or "") + part
    return made


def page(title: str, style: str, *body: Content, schemes: str = "") -> str:
    """A whole document. Its own policy forbids scripts and the network, whatever its text says.

    Args:
        title: plain text.
        style: CSS.
        body: what it shows.
        schemes: colour schemes that the style has, such as "light dark"; "" says nothing.
    """
    policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", **policy),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        *([node("meta", name="color-scheme", content=schemes)] if schemes else []),
        node("title", title),
        node("style", style),
    )
    root = node("html", head, node("body", node("main", *body)), lang="en")
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"
