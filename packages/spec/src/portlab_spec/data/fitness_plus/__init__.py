"""`fitness-plus`: a generated data set of tool calls with arguments, for a fitness watch and its coach.

dates.py      expressions of time and what they mean
slots.py      other values as people say them, with the arguments they mean
phrasings.yaml, dialogue.yaml, grammar.py      wordings, and how they are filled and styled
functions.py  28 functions: declarations and sample results
generate.py   kinds of conversation, splits, tools on offer
"""

from portlab_spec.conversation import Conversation, Tool

NAME = "fitness-plus"
FIXED = "fitness-plus-fixed"  # the rows that share one prompt up to the question


# The generator is imported when the set is asked for: naming the set should cost nothing.


def tools() -> tuple[Tool, ...]:
    """All tools, in a fixed order."""
    from portlab_spec.data.fitness_plus import functions

    return functions.tools()


def load(seed: int = 0) -> list[Conversation]:
    """All conversations, made once per process and seed; the same seed gives the same bytes."""
    from portlab_spec.data.fitness_plus.generate import conversations

    return list(conversations(seed))


def load_fixed() -> list[Conversation]:
    """Those that offer the same tools in the same order on the same date, as one deployed application does."""
    return [conversation for conversation in load() if conversation.meta["offer"] == "fixed"]
