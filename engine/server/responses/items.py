"""The items that a response goes on from: messages, calls and their results, reasoning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter

from engine.core.errors import printable
from engine.server.body import Body, SentBack
from engine.server.errors import ApiError
from engine.server.responses.tools import AskedTool
from engine.server.tools.schema import CalledFunction, ToolName


class ContentText(Body):
    """A part of a message. Pictures, files and sound are not supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: SentBack = False
    logprobs: SentBack = False
    parsed: SentBack = False


class UnreadPart(Body):
    """A result of a tool that is not text. The model sees a note in its place: a refusal would come back with every
    later turn.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["input_image", "input_file", "input_audio", "encrypted_content"]

    @property
    def text(self) -> str:
        return f"[{self.type}: not shown, this model reads text]"


class EarlierItem(Body):
    """The fields that every item of an earlier answer may have, and on which no answer depends."""

    id: SentBack = False
    status: SentBack = False


class MessageItem(EarlierItem):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentText]
    phase: SentBack = False


class FunctionCallItem(CalledFunction, EarlierItem):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    namespace: ToolName | None = None
    caller: SentBack = False


class CustomCallItem(EarlierItem):
    """A call of an earlier answer, of a tool that takes one text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: ToolName
    input: str
    namespace: ToolName | None = None
    caller: SentBack = False


class ShellAction(Body):
    """A command for the client's shell."""

    type: Literal["exec"] = "exec"
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCallItem(Body):
    """A command of an earlier answer. Without a `call_id` its `id` names it."""

    type: Literal["local_shell_call"]
    action: ShellAction
    call_id: str | None = None
    id: str | None = None
    status: SentBack = False


class CallOutputItem(EarlierItem):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[Annotated[ContentText | UnreadPart, Field(discriminator="type")]]
    caller: SentBack = False
    name: SentBack = False
    namespace: SentBack = False


class ShellOutputItem(Body):
    """The result of a command. id: of its call."""

    type: Literal["local_shell_call_output"]
    id: str
    output: str
    status: SentBack = False


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(EarlierItem):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: SentBack = False
    encrypted_content: SentBack = False


class AdditionalToolsItem(Body):
    """Tools that a later turn has added."""

    type: Literal["additional_tools"]
    tools: list[AskedTool] = Field(max_length=512)
    role: SentBack = False
    id: SentBack = False


class ItemReference(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: str


class ForeignItem(Body):
    """An item that another server's own tools have left in a conversation. It is left out, and the log says so."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal[
        "agent_message", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction",
        "computer_call", "computer_call_output", "configuration_update", "context_compaction", "file_search_call",
        "image_generation_call", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools",
        "program", "program_output", "shell_call", "shell_call_output", "tool_search_call", "tool_search_output",
        "web_search_call",
    ]  # fmt: skip

    @property
    def ignored(self) -> list[str]:
        return [f"input.{self.type}"]


def _typed(item: Any) -> Any:
    """Add the type of a message or of a reference, which they may leave out."""
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    return {**item, "type": "item_reference" if {"id"} <= item.keys() <= {"id", "type"} else "message"}


OwnCall = FunctionCallItem | CustomCallItem | LocalShellCallItem
Item = Annotated[
    Annotated[
        MessageItem
        | OwnCall
        | CallOutputItem
        | ShellOutputItem
        | ReasoningItem
        | AdditionalToolsItem
        | ItemReference
        | ForeignItem,
        Field(discriminator="type"),
    ],
    BeforeValidator(_typed),
]


_STORED: TypeAdapter[Item] = TypeAdapter(Item)


def without_references(given: Sequence[Item], stored: Callable[[str], dict[str, Any]]) -> list[Item]:
    """Return the items, with `stored` ones in place of references to them. Raises ApiError for two references to the
    same item.
    """
    numbers = Counter(item.id for item in given if isinstance(item, ItemReference))
    if numbers and (most := numbers.most_common(1)[0])[1] > 1:
        raise ApiError(400, f"input: refers to the item {printable(most[0], 100)} twice; leave one out", param="input")
    return [_STORED.validate_python(stored(item.id)) if isinstance(item, ItemReference) else item for item in given]


def text_of(content: str | Sequence[ContentText | UnreadPart]) -> str:
    """Return the text of a message or of the result of a call."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
