"""Chat templates in the manner of the three families, for the tests of rendering."""

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}
            {{- ' ' + message['content'] + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
TURNS = """{{ bos_token }}
{%- set state = namespace(seen=0) -%}
{%- for message in messages -%}
    {%- if message.get('tool_calls') is not none and message['tool_calls'] is defined -%}
        {{- message['tool_calls'] | tojson(indent=1) -}}
        {%- continue -%}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{- '<start_of_turn>' + role + '\n' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] | trim -}}
    {%- else -%}
        {%- for item in message['content'] if item['type'] == 'text' -%}{{- item['text'] | trim -}}{%- endfor -%}
    {%- endif -%}
    {{- '<end_of_turn>\n' -}}
    {%- set state.seen = state.seen + 1 -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
{%- if tools -%}{{- 'tools' -}}{%- endif -%}
{{- strftime_now('%Y') | length }} {{ state.seen }}"""

TEMPLATES = {"chatml": CHATML, "inst": INST, "turns": TURNS}
USER = {"role": "user", "content": "héllo <b>&amp;</b> 世界\n"}
CONVERSATIONS = [
    [USER],
    [USER, {"role": "assistant", "content": "yes, ok"}, {"role": "user", "content": " and then? "}],
]
