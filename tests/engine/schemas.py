"""Nested JSON schemas with a question each, for answers that must be valid. Everything in them is bounded, so that
every answer ends.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def fields(**properties: Schema) -> Schema:
    """Return the schema of an object with all of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def some(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def text(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


def whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


NUMBER, YES_NO = {"type": "number"}, {"type": "boolean"}
DATE: Schema = {"type": "string", "pattern": r"^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])$"}
ADDRESS = fields(street=text(30), city=text(20), zip={"type": "string", "pattern": "^[0-9]{5}$"})
LEAVES = {"leaf": fields(label=text(12)), "node": fields(label=text(12), children=some({"$ref": "#/$defs/leaf"}, 0, 3))}
CIRCLE = fields(kind={"const": "circle"}, radius=whole(1, 99))
BOX = fields(kind={"const": "box"}, width=whole(1, 99), height=whole(1, 99))
BOOK = fields(item=text(30), quantity=whole(1, 20), price=NUMBER)

SCHEMAS: dict[str, tuple[str, Schema]] = {
    "order": (
        "Write an order of two books.",
        fields(
            customer=fields(name=text(25), address=ADDRESS), lines=some(BOOK, 1, 2), state={"enum": ["open", "paid"]}
        ),
    ),
    "sensor": (
        "Give the readings of a sensor.",
        fields(device=fields(id=whole(1, 9999)), readings=some(fields(at=DATE, celsius=NUMBER, ok=YES_NO), 3, 4)),
    ),
    "matrix": ("Give a matrix of three rows.", fields(name=text(15), rows=some(some(whole(-99, 99), 3, 3), 3, 3))),
    "choice": ("Name a shape with its measures.", fields(shapes=some({"anyOf": [CIRCLE, BOX]}, 2, 3))),
    "tree": ("Draw a tree of animals.", {"$defs": LEAVES, "$ref": "#/$defs/node"}),
    "recipe": (
        "Give a recipe for pancakes.",
        fields(title=text(30), ingredients=some(fields(name=text(20)), 2, 4), steps=some(text(60), 2, 3)),
    ),
}
