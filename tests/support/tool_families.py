"""Families whose models call tools, in small: they write tools and calls as the families' own templates do."""

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, normalizers

from chat_families import FAMILIES, Family, byte_level, ordinary, sentencepiece, special

_HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nReply with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.reasoning_content %}{{- '\\n<think>' + message.reasoning_content + '</think>' }}{%- endif %}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# Tools are in the first message of the user, results are JSON, and there is one call at a time.
_LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- system_message + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Ids of calls have 9 letters and digits.
_MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set function = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in function.items() if key != 'return' %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
                    {%- else %}{{- '"' + key + '": ' + value | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}
                {{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' }}{%- endif %}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.id is not defined or tool_call.id | length != 9 %}{{- raise_exception('9') }}{%- endif %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] + ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('9') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

# Arguments are text; a message with calls has no content.
_DEEPSEEK = """\
{{- bos_token }}
{%- if tools %}{%- for tool in tools %}{{- '\\n## ' + tool.function.name + '\\n' + tool.function.parameters | tojson }}
{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and not message['content'] is string %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for tool in message['tool_calls'] %}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] }}
            {{- '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}{{- '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"""

# Tags for functions and parameters, values as text.
_QWEN3_CODER = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}
        {%- set function = tool.function %}
        {{- '\\n<function>\\n<name>' ~ function.name ~ '</name>' }}
        {%- if function.description is defined %}
            {{- '\\n<description>' ~ function.description ~ '</description>' }}
        {%- endif %}
        {%- for name, fields in function.parameters.properties | items %}
            {{- '\\n<parameter>\\n<name>' ~ name ~ '</name>\\n<type>' ~ fields.type ~ '</type>\\n</parameter>' }}
        {%- endfor %}
        {{- '\\n</function>' }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls is defined and message.tool_calls is iterable %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}
            {{- '\\n' + message.content | trim + '\\n' }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
            {%- for name, value in tool_call.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Mistral Small 3.2, Devstral and Magistral: names and arguments without JSON around them.
_MISTRAL_ARGS = """\
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '\\nFirst draft your thoughts: [THINK]…[/THINK][/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + tool_call.function.name + '[ARGS]' + tool_call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

# Granite 3.3.
_GRANITE = """\
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = 'You are Granite, developed by IBM.' %}
{%- endif %}
{%- if tools %}
    {%- set system_message = system_message + ' When a tool is required to answer the query, respond only with
<|tool_call|> followed by a JSON list of tools used.' %}
{%- endif %}
{%- if thinking %}
    {%- set system_message = system_message + ' Write your thoughts between <think></think> and write your response
between <response></response>.' %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content }}
    {%- if message.tool_calls %}
        {{- '<|tool_call|>[' }}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.function | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' }}
    {%- endif %}
    {{- '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""

# Llama 3.2 with the calls that Meta's prompts ask for.
_PYTHONIC = """\
{{- bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}
    {{- 'You MUST put calls in the format of [func_name1(params_name1=params_value1, ' }}
    {{- 'params_name2=params_value2...), func_name2(params)]\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {{- '[' }}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.function.name + '(' }}
            {%- for name, value in tool_call.function.arguments | items %}
                {{- name + '=' + value | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
            {%- endfor %}
            {{- ')' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' }}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# The system's message has the tools; the template writes calls only.
_DEEPSEEK_V31 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜></think>' + (message.content or '') }}
        {%- if message.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for tool in message.tool_calls %}
                {{- '<｜tool▁call▁begin｜>' + tool.function.name + '<｜tool▁sep｜>' }}
                {{- tool.function.arguments + '<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- endif %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking is defined and thinking else '</think>') }}
{%- endif %}"""

# gpt-oss: a message has one call, and text or reasoning before it. Tools and parameters must have a description.
_HARMONY = """\
{%- macro system() -%}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
    {{- 'You are ChatGPT.\\nReasoning: ' + reasoning_effort + '\\n\\n# Valid channels: analysis, commentary, final.' }}
    {{- "\\nCalls to these tools must go to the commentary channel: 'functions'." }}
{%- endmacro -%}
{{- '<|start|>system<|message|>' + system() + '<|end|>' }}
{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}
    {%- set instructions = messages[0].content %}{%- set messages = messages[1:] %}
{%- else %}{%- set instructions = '' %}
{%- endif %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|># Instructions\\n\\n' + instructions }}
    {%- if tools %}
        {{- '\\n\\n# Tools\\n\\nnamespace functions {\\n\\n' }}
        {%- for tool in tools %}
            {{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: {\\n' }}
            {%- for name, schema in tool.function.parameters.properties.items() %}
                {{- '// ' + schema.description + '\\n' + name + ': ' + (schema.type or 'any') + ',\\n' }}
            {%- endfor %}
            {{- '}) => any;\\n\\n' }}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if 'tool_calls' in message %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.content and message.thinking %}
                {{- raise_exception('Cannot pass both content and thinking in a message with tool calls!') }}
            {%- elif message.content or message.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) }}
                {{- '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson + '<|call|>' }}
            {%- set last.name = call.name %}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# GLM-4.6: the tags of parameters are tokens.
_GLM = """\
[gMASK]<sop>
{%- if tools %}
    {{- '<|system|>\\n<tools>\\n' }}
    {%- for tool in tools %}{{- tool | tojson(ensure_ascii=False) + '\\n' }}{%- endfor %}
    {{- '</tools>\\n<tool_call>{function-name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>' }}
    {{- '\\n...\\n</tool_call>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>\\n<think>' + (m.reasoning_content or '') + '</think>\\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) }}
                {{- '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}{{- '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- else %}{{- '<|system|>\\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

_MINIMAX = """\
{%- set begin = '<minimax:tool_call>' %}
{{- ']~!b[]~b]system\\nYou are a helpful assistant.' }}
{%- if tools %}
    {%- for tool in tools %}{{- '\\n<tool>' + tool.function | tojson + '</tool>' }}{%- endfor %}
    {{- '\\n' + begin + '\\n<invoke name="tool">\\n<parameter name="key">value</parameter>\\n</invoke>' }}
{%- endif %}
{{- '[e~[\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- ']~b]ai\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- if message.tool_calls %}
            {{- '\\n' + begin + '\\n' }}
            {%- for call in message.tool_calls %}
                {{- '<invoke name="' + call.function.name + '">\\n' }}
                {%- for k, v in call.function.arguments | items %}
                    {{- '<parameter name="' + k + '">' + (v if v is string else v | tojson) + '</parameter>\\n' }}
                {%- endfor %}
                {{- '</invoke>\\n' }}
            {%- endfor %}
            {{- '</minimax:tool_call>' }}
        {%- endif %}
        {{- '[e~[\\n' }}
    {%- elif message.role == 'tool' %}{{- ']~b]tool\\n<response>' + message.content + '</response>[e~[\\n' }}
    {%- else %}{{- ']~b]' + message.role + '\\n' + message.content + '[e~[\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}"""

_SEED = """\
{%- for tool in tools or [] %}{{- '<seed:bos>system\\ndef ' + tool | tojson + '<seed:eos>' }}{%- endfor %}
{%- if tools %}{{- '<seed:tool_call>\\n<function=f>\\n<parameter=p>value_1</parameter>\\n</function>' }}{%- endif %}
{%- for message in messages %}
    {{- '<seed:bos>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<seed:think>' + message.reasoning_content + '</seed:think>\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for k, v in call.function.arguments | items %}
            {{- '<parameter=' + k + '>' + (v if v is string else v | string) + '</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</seed:tool_call>' }}
    {%- endfor %}
    {{- '<seed:eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<seed:bos>assistant\\n' }}{%- endif %}"""

# Kimi K2: the name of a call stands in its id alone.
_KIMI = """\
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|im_assistant|>assistant<|im_middle|><think>' + message.get('reasoning_content', '') + '</think>' }}
        {{- message['content'] }}
        {%- if message.get('tool_calls') %}
            {{- '<|tool_calls_section_begin|>' }}
            {%- for call in message['tool_calls'] %}
                {{- '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}
                {{- call['function']['arguments'] | tojson + '<|tool_call_end|>' }}
            {%- endfor %}
            {{- '<|tool_calls_section_end|>' }}
        {%- endif %}
    {%- elif message['role'] == 'tool' %}
        {{- '<|im_system|>tool<|im_middle|>## Return of ' + message.tool_call_id + '\\n' + message['content'] }}
    {%- else %}
        {{- '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' + message['content'] }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""

_SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""


def _chatml(calls: str, thought: tuple[str, str] = ("", "")) -> str:
    """A template in which an assistant's message has reasoning between two markers, text, and what `calls` writes."""
    begin, end = thought
    return f"""\
{{%- if tools %}}{{{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}}}{{%- endif %}}
{{%- for message in messages %}}
    {{{{- '<|im_start|>' + message.role + '\\n' }}}}
    {{%- if message.reasoning_content %}}{{{{- '{begin}' + message.reasoning_content + '{end}' }}}}{{%- endif %}}
    {{{{- message.content }}}}
    {{%- if message.tool_calls %}}{calls}{{%- endif %}}
    {{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}"""


def _array_of(call: str, opening: str, closing: str, separator: str = ", ") -> str:
    """Calls as `call` writes the function `f`, the number `n`."""
    return (
        f"{{{{- '{opening}' }}}}{{%- for one in message.tool_calls %}}"
        f"{{%- set f = one.function %}}{{%- set n = loop.index0 | string %}}{{{{- {call} }}}}"
        f"{{%- if not loop.last %}}{{{{- '{separator}' }}}}{{%- endif %}}{{%- endfor %}}{{{{- '{closing}' }}}}"
    )


_JSON_CALL = """'{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}'"""
_THINK_MARKERS = ("<think>", "</think>")
# By the name of the family: its template, and markers that are special and that are not.
_IN_CHATML: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "command r7b": (
        _chatml(
            _array_of(
                """'{"tool_call_id": "' + n + '", "tool_name": "' + f.name + '", "parameters": '
                + f.arguments | tojson + '}'""",
                "<|START_ACTION|>[\\n    ",
                "\\n]<|END_ACTION|>",
                ",\\n    ",
            )
            + "{{- '' if message.tool_calls else '<|START_RESPONSE|><|END_RESPONSE|>' }}",
            ("<|START_THINKING|>", "<|END_THINKING|>"),
        ),
        (
            *("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),
            *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        (),
    ),
    "apertus": (
        _chatml(
            _array_of("""'{"' + f.name + '": ' + f.arguments + '}'""", "<|tools_prefix|>[", "]<|tools_suffix|>"),
            ("<|inner_prefix|>", "<|inner_suffix|>"),
        ),
        ("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
        (),
    ),
    "hunyuan": (
        _chatml(
            _array_of(_JSON_CALL, "<tool_calls>[", "]</tool_calls>") + "{{- '' or '<answer></answer>'[:0] }}",
            _THINK_MARKERS,
        ),
        (),
        (),
    ),
    "longcat": (
        _chatml(
            _array_of(
                _JSON_CALL,
                "<longcat_tool_call>\\n",
                "\\n</longcat_tool_call>",
                "\\n</longcat_tool_call>\\n<longcat_tool_call>\\n",
            ),
            ("<longcat_think>", "</longcat_think>"),
        ),
        (),
        ("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_think>", "</longcat_think>"),
    ),
    "nemotron nano 2": (_chatml(_array_of(_JSON_CALL, "<TOOLCALL>[", "]</TOOLCALL>"), _THINK_MARKERS), (), ()),
    "phi-4-mini": (
        _chatml(_array_of(_JSON_CALL, "<|tool_call|>[", "]<|/tool_call|>")),
        ("<|tool_call|>", "<|/tool_call|>"),
        (),
    ),
    "phi-4-mini, vllm": (_chatml(_array_of(_JSON_CALL, "functools[", "]")), (), ()),
    "olmo 3": (
        _chatml(
            _array_of(
                """f.name + '(' + (f.arguments | items | map('join', '=') | join(', ')) + ')'""",
                "<function_calls>\\n",
                "\\n</function_calls>",
                "\\n",
            ),
            _THINK_MARKERS,
        ),
        (),
        (),
    ),
    "lfm2.5": (
        _chatml(
            _array_of(
                """f.name + '(' + (f.arguments | items | map('join', '=') | join(', ')) + ')'""",
                "<|tool_call_start|>[",
                "]<|tool_call_end|>",
            )
        ),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        (),
    ),
    "gemma 4": (
        _chatml(
            _array_of(
                """'<|tool_call>call:' + f.name + '{' + (f.arguments | items | map('join', ':<|"|>') | join('<|"|>,'))
                + '<|"|>}<tool_call|>'""",
                "",
                "",
                "",
            ),
            ("<|channel>thought\\n", "<channel|>"),
        ),
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        (),
    ),
    "functiongemma": (
        _chatml(
            _array_of(
                """'<start_function_call>call:' + f.name + '{'
                + (f.arguments | items | map('join', ':<escape>') | join('<escape>,'))
                + '<escape>}<end_function_call>'""",
                "",
                "",
                "",
            )
        ),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        (),
    ),
    "xlam": (_chatml(_array_of(_JSON_CALL, "[", "]")) + "{#- #}{{- 'Salesforce xLAM'[:0] }}", (), ()),
}
_QWEN_MARKERS = [
    *special("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *ordinary("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
]
_LLAMA3_MARKERS = special(
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"
)
_MISTRAL_MARKERS = special(
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"
)
_MISTRAL_ARGS_MARKERS = special(
    *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
    *(
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[TOOL_CONTENT]",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
    ),
    *("[THINK]", "[/THINK]"),
)
_GRANITE_MARKERS = special("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
_DEEPSEEK_MARKERS = [
    *special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    *ordinary(
        "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"
    ),
    *ordinary("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
]
_GLM_MARKERS = [
    *special("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *ordinary("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *ordinary("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
]
_MINIMAX_MARKERS = [
    *special("]~!b[", "]~b]", "[e~["),
    *ordinary("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
]
_KIMI_MARKERS = [
    *special("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *ordinary("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *ordinary("<|tool_call_argument_begin|>", "<think>", "</think>"),
]
_SEED_MARKERS = special(
    *("<seed:bos>", "<seed:eos>", "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>")
)
_HARMONY_MARKERS = special(
    *("<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"),
)
_DEEPSEEK_V31_MARKERS = [*_DEEPSEEK_MARKERS, *ordinary("<think>", "</think>")]


def _family(
    name: str, source: str, make_tokenizer: Callable[[], Tokenizer], special_tokens: dict[str, str] | None = None
) -> Family:
    return Family(name, source, make_tokenizer, special_tokens or {}, ("system", "user", "assistant", "tool"))


TOOL_FAMILIES = {
    family.name: family
    for family in (
        _family("hermes", _HERMES, lambda: byte_level(_QWEN_MARKERS, normalizers.NFC())),
        _family("llama3.1", _LLAMA3, lambda: byte_level(_LLAMA3_MARKERS), {"bos_token": "<|begin_of_text|>"}),
        _family(
            "mistral v3", _MISTRAL, lambda: sentencepiece(_MISTRAL_MARKERS, prefix="first"),
            {"bos_token": "<s>", "eos_token": "</s>"},
        ),
        _family(
            "deepseek v3", _DEEPSEEK, lambda: byte_level(_DEEPSEEK_MARKERS), {"bos_token": "<｜begin▁of▁sentence｜>"}
        ),
        _family("qwen3-coder", _QWEN3_CODER, lambda: byte_level(_QWEN_MARKERS, normalizers.NFC())),
        _family(
            "mistral small 3.2", _MISTRAL_ARGS, lambda: byte_level(_MISTRAL_ARGS_MARKERS),
            {"bos_token": "<s>", "eos_token": "</s>"},
        ),
        _family("granite 3.3", _GRANITE, lambda: byte_level(_GRANITE_MARKERS)),
        _family("llama3.2", _PYTHONIC, lambda: byte_level(_LLAMA3_MARKERS), {"bos_token": "<|begin_of_text|>"}),
        _family("glm 4.6", _GLM, lambda: byte_level(_GLM_MARKERS)),
        _family("kimi k2", _KIMI, lambda: byte_level(_KIMI_MARKERS)),
        _family("minimax m2", _MINIMAX, lambda: byte_level(_MINIMAX_MARKERS)),
        _family("seed-oss", _SEED, lambda: byte_level(_SEED_MARKERS)),
        *(
            _family(name, source, lambda marks=(hidden, shown): byte_level(  # type: ignore[misc]
                [*special("<|im_start|>", "<|im_end|>", *marks[0]), *ordinary(*marks[1])]
            ))
            for name, (source, hidden, shown) in _IN_CHATML.items()
        ),
        _family("gpt-oss", _HARMONY, lambda: byte_level(_HARMONY_MARKERS)),
    )
}  # fmt: skip
"""Those whose templates take tools."""

CALLING_FAMILIES = TOOL_FAMILIES | {
    family.name: family
    for family in (
        _family(
            "deepseek v3.1", _DEEPSEEK_V31, lambda: byte_level(_DEEPSEEK_V31_MARKERS),
            {"bos_token": "<｜begin▁of▁sentence｜>"},
        ),
        _family("smollm2", _SMOLLM2, lambda: byte_level(special("<|im_start|>", "<|im_end|>"))),
        FAMILIES["chatml"],
    )
}  # fmt: skip
"""Also those where the system's message has the tools."""


def tool(name: str, description: str = "Weather of a city.", **properties: Any) -> dict[str, Any]:
    """A tool in OpenAI's form; `properties` are schemas by name."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
