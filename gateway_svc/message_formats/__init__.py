"""How families of models write reasoning, text and tool calls in an assistant's turn.

- `formats.TOOL_FORMATS` and `formats.REASONING_FORMATS` hold the descriptions by name. A `MessageFormat` is one of
  each; either may be None. `formats.choose_format()` chooses them by the settings and the model's chat template.
- `parser.MessageParser` turns the output of a sequence into events (`events`), piece by piece. The events are a
  function of the pieces so far, joined: they do not depend on where the output is split.
- `grammar.TurnGrammar` makes the grammar of a turn with calls, in llguidance's Lark syntax.
- `prompted.prompted_messages()` adds a system message that describes the tools, for chat templates without a
  place for them.
- `layout.write_calls()` is the text of calls as a model of that format writes them.

The modules of the package import nothing else of the gateway but what is about JSON schemas.
"""
