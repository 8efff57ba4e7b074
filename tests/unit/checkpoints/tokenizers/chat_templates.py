"""Chat templates in the style of well-known families, each with the constructs of jinja that its family uses."""

from __future__ import annotations

from typing import Final

TEMPLATES: Final[dict[str, str]] = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
        " + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "chatml with a system message of its own": """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{% endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content | trim ~ '<|im_end|>\\n' }}
{% endfor %}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif %}""",
    "llama 2": """{% if messages[0]['role'] == 'system' %}
{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if loop.index0 == 0 and system_message != false %}
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama 3": """{{- bos_token }}
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' +
        message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "llama 3.1 with tools and the date": """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y")[:3] %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none and messages | length != 0 %}
    {%- set first_user_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("One tool call at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}""",
    "mistral with tools": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or
        (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate") }}
        {%- endif %}{%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}{{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}{{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}{{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}{%- else %}{%- set content = message.content %}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}{{- '"call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}
{%- endfor %}""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}
{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "gemma 3": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}""",
    "phi 3": (
        "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + "
        "'<|end|>\\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}"
        "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}"
        "{% endif %}"
    ),
    "phi 4 mini with tools": (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
        "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + "
        "message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + "
        "message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "qwen 2.5 with tools": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
    {%- else %}{{- 'You are Qwen.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
        (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "qwen 3 with thinking": """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not
        (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query_index or (loop.last and reasoning_content) %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}{{- content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "deepseek r1": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
        "{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}"
        "{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = "
        "message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}"
        "{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
        "{{'<｜User｜>' + message['content']}}{%- endif %}"
        "{%- if message['role'] == 'assistant' and message['content'] is none %}{{'calls'}}{%- endif %}"
        "{%- if message['role'] == 'assistant' and message['content'] is not none %}"
        "{% set content = message['content'] %}{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
        "{% if ns.is_tool %}{{'<｜tool▁outputs▁end｜>'}}{% endif %}"
        "{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
    ),
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "falcon": (
        "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
        "{{ message['role'].capitalize() }}: {{ message['content'] | replace('\\r\\n', '\\n') | "
        "replace('\\n\\n', '\\n') }}{% endfor %}{% if add_generation_prompt %}{{ '\\n' + 'Assistant:' }}{% endif %}"
    ),
    "command r with macros": """{%- macro json_to_python_type(json_spec) %}
{%- set basic_type_map = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
{%- if json_spec.type is string and basic_type_map[json_spec.type] is defined %}{{- basic_type_map[json_spec.type] }}
{%- elif json_spec.type == "array" %}{{- "List[" + json_to_python_type(json_spec['items']) + "]"}}
{%- elif json_spec.type is iterable and json_spec.type is not string %}{{- "Union[" }}
{%- for t in json_spec.type %}{{- json_to_python_type({"type": t}) }}{%- if not loop.last %}{{- "," }}{%- endif %}
{%- endfor %}{{- "]" }}{%- else %}{{- "Any" }}{%- endif %}{%- endmacro %}
{{- bos_token }}<|SYSTEM_TOKEN|>
{%- for tool in tools or [] %}
def {{ tool.function.name }}(
    {%- for name, fields in tool.function.parameters.get('properties', {}) | dictsort %}
        {{- name }}: {{ json_to_python_type(fields) }}{{ ", " if not loop.last }}
    {%- endfor %}) - {{ tool.function.description | default('no description', true) | wordwrap(20) }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role | lower == 'user' %}<|USER_TOKEN|>{{ message.content.strip() | indent(2, true) }}
    {%- elif message.role in ['assistant', 'chatbot'] %}<|CHATBOT_TOKEN|>{{ message.content | e }}
    {%- endif %}<|END_OF_TURN_TOKEN|>
{%- endfor %}
{%- if add_generation_prompt %}<|CHATBOT_TOKEN|>{% endif %}""",
    "granite with documents": """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Knowledge Cutoff Date: April 2024.\\nToday's Date: " + strftime_now('%Y')[:2] %}
    {%- if tools and documents %}{%- set system_message = system_message + " Tools and documents." %}
    {%- elif tools %}{%- set system_message = system_message + " Tools." %}{%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4, sort_keys=true) }}{%- endif %}
{%- for document in documents or [] %}{{ 'Document ' + loop.index | string + ': ' + document['text'] }}{%- endfor %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{- ' ' + controls | tojson }}{%- endif %}{{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}""",
    "vicuna": (
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}{% set rest = messages[1:] %}"
        "{% else %}{{ 'A chat between a curious user and an AI. ' }}{% set rest = messages %}{% endif %}"
        "{% for message in rest %}{% if message['role'] == 'user' %}{{ 'USER: ' ~ message['content'] ~ ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' ~ message['content'] ~ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "smollm 3 with generation marks": """{%- set ns = namespace(text="", reasoning=enable_thinking | default(true)) -%}
{%- for message in messages -%}
    {%- if message.role == "system" %}{%- set ns.text = message.content %}
        {%- if "/no_think" in ns.text %}{% set ns.reasoning = false %}
            {%- set ns.text = ns.text | replace("/no_think", "") | trim %}{% endif %}{% continue %}{%- endif -%}
    {%- if message.role == "user" %}{{ "<|im_start|>user\\n" + message.content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}{{ "<|im_start|>assistant\\n" + message.content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- endgeneration %}
    {%- else -%}{% break %}{%- endif -%}
{%- endfor -%}
{{ ns.text }}{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" ~ ("" if ns.reasoning else "<think>\\n") }}
{%- endif %}""",
    "gpt-oss with channels": """{%- macro render(value, level=0) -%}
    {%- if value is mapping -%}{%- for key, item in value.items() -%}{{ "\\n" ~ "  " * level ~ key ~ ":" }}
        {{- render(item, level + 1) }}{%- endfor -%}
    {%- elif value is sequence and value is not string -%}{{ value | map('string') | join(' | ') }}
    {%- elif value is boolean or value is number -%}{{ value | string | lower }}
    {%- else -%}{{ " " ~ value }}{%- endif -%}
{%- endmacro -%}
{%- set loop_messages = messages | rejectattr('role', 'in', ['system', 'developer']) | list -%}
{{- "<|start|>system<|message|>Reasoning: " ~ (reasoning_effort or "medium") ~ "<|end|>" }}
{%- if tools is defined and tools %}{{ "namespace functions {" }}{%- for tool in tools %}{{ render(tool.function) }}
{%- endfor %}{{ "\\n}" }}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if message.thinking is defined -%}{{ "<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
    {%- endif -%}
    {%- set last = loop_messages[loop.index0 - 1] if loop.index0 > 0 else none -%}
    {{- "<|start|>" ~ message.role ~ ("" if last is none else " to=" ~ last.role) ~ "<|message|>" }}
    {%- if message.content is string %}{{ message.content }}{%- elif message.content %}
        {{- message.content | map(attribute='text', default='') | join }}{%- endif %}{{ "<|end|>" }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}""",
    "olmo with a filter block and a scoped variable": """{{ bos_token }}
{%- filter upper %}{% for message in messages %}{% with role = message.role %}<|{{ role }}|>{% endwith %}{% endfor %}
{%- endfilter %}
{% for role, group in messages | groupby('role') %}{{ role }}={{ group | length }}{{ ';' if not loop.last }}{% endfor %}
{{ messages | map(attribute='content') | first | default('', true) | string | truncate(9, true, '…') }}
{{ range(3) | list | tojson(separators=(',', ':')) }}
{{ dict(a=1, **{'b': 2}) | tojson }}{{ "%s-%d" | format("x", 3) }}""",
    "jamba with nested loops": """{% set calls = namespace(count=0) %}
{%- for message in messages recursive %}
{%- if loop.depth == 1 %}{{ loop.cycle('odd', 'even') }} {{ message.role }}
{%- if loop.previtem is defined %} after {{ loop.previtem.role }}{% endif %}
{%- if loop.nextitem is defined %} before {{ loop.nextitem.role }}{% endif %} {{ loop.revindex }}
{%- for call in message.tool_calls or [] %}{% set calls.count = calls.count + 1 %} [{{ loop.index }}]{% endfor %}
{% endif %}
{%- else %}none{% endfor %}
{{ calls.count }}{{ '\\n' }}{{ messages[-1].content is undefined }} {{ messages[-1]['name'] is none }}
{{ tools | length if tools is not none else 'no tools' }}
{{ (tools or []) | map(attribute='function.name') | join(',') }}""",
}
