"""The control tokens of the two native tool-call dialects, FunctionGemma's and Gemma 4's.

Both dialects have one grammar and the same ids for corresponding tokens (46-52); they differ in how the tokens
are spelt, and Gemma 4 adds a thinking channel.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Markers:
    """Names of the control tokens; `quote` opens and closes a string, `reserved` may not stand in text either."""

    turn: str
    end_turn: str
    declare: str
    end_declare: str
    call: str
    end_call: str
    response: str
    end_response: str
    quote: str
    bos: str = "<bos>"
    eos: str = "<eos>"
    pad: str = "<pad>"
    think: str = ""
    channel: str = ""
    end_channel: str = ""
    reserved: tuple[str, ...] = ()

    @cached_property
    def structure(self) -> tuple[str, ...]:
        """Every token that structures a conversation."""
        optional = (self.think, self.channel, self.end_channel)
        return (self.bos, self.eos, self.pad, self.turn, self.end_turn, *self.function, *filter(None, optional))

    @cached_property
    def function(self) -> tuple[str, ...]:
        """The tokens of declarations, calls and results, in the order of their ids, 46 to 52."""
        return (
            self.declare, self.end_declare, self.call, self.end_call, self.response, self.end_response, self.quote,
        )  # fmt: skip

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Tokens that end the model's output; after calls it is the opening of the result."""
        return (self.eos, self.end_turn, self.response)

    @cached_property
    def refused(self) -> tuple[str, ...]:
        """What text may not hold."""
        return self.structure + self.reserved


FUNCTIONGEMMA = Markers(
    turn="<start_of_turn>",
    end_turn="<end_of_turn>",
    declare="<start_function_declaration>",
    end_declare="<end_function_declaration>",
    call="<start_function_call>",
    end_call="<end_function_call>",
    response="<start_function_response>",
    end_response="<end_function_response>",
    quote="<escape>",
    reserved=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)

GEMMA4 = Markers(
    turn="<|turn>",
    end_turn="<turn|>",
    declare="<|tool>",
    end_declare="<tool|>",
    call="<|tool_call>",
    end_call="<tool_call|>",
    response="<|tool_response>",
    end_response="<tool_response|>",
    quote='<|"|>',
    think="<|think|>",
    channel="<|channel>",
    end_channel="<channel|>",
    reserved=("<|image|>", "<|audio|>", "<|video|>", "<|image>", "<image|>", "<|audio>", "<audio|>"),
)
