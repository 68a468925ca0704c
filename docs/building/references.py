"""Names in the API's pages: signatures that read well, and links from words in backticks."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import desc_signature, pending_xref
from sphinx.transforms import SphinxTransform
from sphinx.util import inspect

from maxattn import AttentionConfig

ARRAY = re.compile(r"\b(?:jax\.)?jaxlib\._jax\.")
NAME = re.compile(r"(?:maxattn\.|ma\.)?((?:\w+\.)*\w+)(?:\(\))?\Z")
DTYPE, OBJECT = re.compile(r"<class 'jax\.numpy\.(\w+)'>"), re.compile(r"(= ?)<[^=]*?>+(?=[,)])")
FOREIGN = re.compile(
    r"(jax|jaxlib|jaxtyping|numpy|np|flax|nnx|collections|pathlib|os|typing)\b"
    r"|(Array|ndarray|Float|Int|Ints|Bool|Bools|Shaped|Mesh|Module|Rngs|Path|Self)\Z"
    r"|(Overrides|Config)\Z"
    # Without their module, since pages import them for types alone.
    r"|(MeshShape|Mode|Stage|Sum|Decision)\Z"
    # Of maxattn's own: what a user is given and looks into, and has no page.
    r"|maxattn(\.\w+)+\.(Kernel|Strategy|Collective|Device|Tuned|CallTimes|Entry|F|C)\Z"
    r"|maxattn(\.\w+)+\.(LayerAudit|KernelAudit|Finding)\Z"
)
ALONE, DOTTED = ("class", "exception", "function"), ("method", "property")


# ---- signatures ----------------------------------------------------------------------------------


def signature(
    app: Any, what: str, name: str, obj: Any, options: Any, words: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Return a signature that is Python, and says what a constructor takes.

    A default that Python does not write as code is `...`. The metaclass of NNX modules hides their
    constructors behind `*args`.
    """
    if what == "class" and words and words.startswith("(*args"):
        own = inspect.signature(obj.__init__, bound_method=True)
        words = inspect.stringify_signature(
            own, show_return_annotation=False, unqualified_typehints=True
        )
    return words and OBJECT.sub(r"\1...", DTYPE.sub(r"jnp.\1", words)), returns


class Signatures(SphinxTransform):
    """Call jax's array `Array` in signatures, as programs do."""

    default_priority = 400

    def apply(self, **kwargs: object) -> None:
        """Shorten each such name."""
        for found in self.document.findall(desc_signature):
            for words in list(found.findall(nodes.Text)):
                if ARRAY.search(words):
                    words.parent.replace(words, nodes.Text(ARRAY.sub("", words)))


# ---- words in backticks --------------------------------------------------------------------------


class Words(SphinxTransform):
    """Let words in backticks that name nothing of the API be code, and no broken link."""

    default_priority = 400

    def apply(self, **kwargs: object) -> None:
        """Replace references that cannot lead anywhere."""
        for reference in list(self.document.findall(pending_xref)):
            if reference.get("reftype") == "obj" and is_code(reference["reftarget"]):
                words = nodes.literal("", reference.astext(), classes=["code"])
                reference.replace_self(words)


def is_code(words: str) -> bool:
    """Tell whether words are a setting of the config, or no name at all."""
    return words in AttentionConfig.model_fields or NAME.match(words) is None


def find(app: Any, env: Any, node: pending_xref, content: nodes.Element) -> nodes.Node | None:
    """Return a link to the one public thing of a name; code where there is none.

    Names such as `jax.jit`, of arguments and of types lead nowhere and are no mistake.
    """
    if node.get("refdomain") != "py" or node["reftype"] not in ("obj", "class"):
        return None
    if (key := public(env.domains.python_domain, node["reftarget"])) is None:
        return content if may_lead_nowhere(node) else None
    entry = env.domains.python_domain.objects[key]
    page = app.builder.get_relative_uri(node["refdoc"], entry.docname)
    made = nodes.reference("", "", content, internal=True, reftitle=key)
    made["refuri"] = f"{page}#{entry.node_id}"
    return made


def public(domain: Any, target: str) -> str | None:
    """Return the whole name of the one object that a name means; of methods `Class.method`."""
    if (name := NAME.match(target)) is None:
        return None
    is_of_a_module = target.startswith("maxattn.")  # `maxattn.rope.apply_rotary` has another page
    short = name[1].rpartition(".")[2] if is_of_a_module else name[1]
    kinds = ALONE + DOTTED if "." in short else ALONE
    found = [key for key, entry in domain.objects.items() if entry.objtype in kinds]
    meant = [key for key in found if key.endswith(f".{short}")]
    return meant[0] if len(meant) == 1 else None


def may_lead_nowhere(node: pending_xref) -> bool:
    """Tell whether a reference is a word in prose, or a type without a page."""
    return node["reftype"] == "obj" or FOREIGN.match(node["reftarget"]) is not None
