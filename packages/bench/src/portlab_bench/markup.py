"""HTML and SVG as a tree, escaped because it is one; a page that may load nothing."""

from xml.etree.ElementTree import Element, tostring

Content = Element | str


def node(tag: str, *content: Content, **attributes: str) -> Element:
    """An element; `class_` is the attribute `class`, `stroke_width` is `stroke-width`."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    for part in content:
        if not isinstance(part, str):
            made.append(part)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + part
        else:
            made.text = (made.text or "") + part
    return made


def document(title: str, style: str, *body: Content) -> str:
    """A whole page. Its own policy forbids scripts and the network, whatever its text says."""
    policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", **policy),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("title", title),
        node("style", style),
    )
    root = node("html", head, node("body", node("main", *body)), lang="en")
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"
