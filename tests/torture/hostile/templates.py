"""Chat templates that try to reach Python, or to exhaust the machine."""

from __future__ import annotations

import json
from pathlib import Path

from tests.torture import runs
from tests.torture.children import Child
from tests.torture.experiment import Case
from tests.torture.hostile.inputs import write_pipeline

MARKER = "reached-python"
TEMPLATES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch reached-python') }}",
    "namespace": "{{ namespace.__init__.__globals__['__builtins__']['open']('reached-python','w') }}",
    "attr": "{{ messages|attr('__class__')|attr('__init__') }}",
    "map": "{{ messages|map(attribute='__class__')|list }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    "format filter": "{{ '%s'|format(messages.__class__) }}",
    "function": "{{ raise_exception.__globals__ }}",
    "code": "{{ strftime_now.__code__ }}{{ strftime_now.__globals__['os'].system('touch reached-python') }}",
    "generator": "{% set g = (messages|map('upper')) %}{{ g.gi_frame.f_globals }}",
    "self": "{{ self._TemplateReference__context }}{{ self.__init__.__globals__ }}",
    "loop": "{% for x in messages recursive %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "mutation": "{{ messages.append(1) }}{{ messages[0].update(x=1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('touch reached-python') }}",
    "extends": "{% extends '/etc/passwd' %}",
    "range": "{% for x in range(10**9) %}{% endfor %}",
    "size": "{{ 'x' * 10**15 }}",
    "power": "{{ (10**10)|string|length }}{{ '%0*d' % (10**14, 1) }}",
    "padding": "{{ 'x'|center(10**15) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "items": "{{ messages|dictsort }}",
    "attributes": "{{ messages|xmlattr }}",
    "codec": "{{ 'x'.encode('no-such') }}{{ 'x'.encode('idna') }}",
    "none": "{{ none|length }}{{ none + 1 }}",
    "nested": "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "nested lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "surrogate": "{{ '\\ud800' }}{{ messages[0].content }}",
    "division": "{{ 1 // 0 }}",
    "digits": "{{ (10**5000)|string }}{{ '1' * 5000|int }}{{ ('1' * 5000)|int }}",
    "dates": "{{ strftime_now('%' * 10000) }}{{ strftime_now('\\x00') }}{{ strftime_now(1) }}",
    "json": "{{ messages|tojson(indent=10**12) }}{{ raise_exception|tojson }}",
    "shuffle": "{{ messages|random }}{{ lipsum(n=2) }}{{ messages|batch(0)|list }}{{ 'x'|truncate(-1) }}",
    "sort": "{{ [1, 'a', none]|sort }}{{ messages|groupby('role.x.y')|list }}{{ messages|sum }}",
}


def judge_template(case: Case, work: Path, name: str) -> None:
    """Render conversations with a hostile template: it ends with a message, and nothing else has happened."""
    (work / "t.jinja").write_text(TEMPLATES[name])
    row = {"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "kite"}]}
    (work / "chat.jsonl").write_text((json.dumps(row) + "\n") * 3)
    model = work / "run/base/artifacts/model"
    (model / "chat_template.jinja").write_text(TEMPLATES[name])
    write_pipeline(work, runs.SFT.replace("data/corpus.jsonl", "chat.jsonl") + 'chat_template = "t.jinja"\n')
    commands = (
        ("data", "chat.jsonl", "--tokenizer", "data/tokenizer", "--chat_template", "t.jinja"),
        ("generate", str(model), "--prompt", "x", "--max_completion_length", "2"),
        ("generate", str(model), "chat.jsonl", "--max_completion_length", "2"),
        ("check", "p.toml"),
    )
    for arguments in commands:
        ended = Child(_limited, arguments, cwd=work).wait(60)
        case.count("renderings")
        if ended.traceback or ended.code not in (0, 1, 2):
            case.fail(f"{arguments[0]}: {str(ended)[-1500:]}")
        for word in ("root:x:0", "<class '", "<function", "module 'os'", "__builtins__"):
            if word in ended.out:
                case.fail(f"{arguments[0]} shows {word}")
    if list(work.rglob(MARKER)):
        case.fail("a template has run a command")


def _limited(arguments: tuple[str, ...]) -> None:
    """Run the command with at most 12 GiB of addresses, so that no template takes the machine's memory."""
    import resource
    import sys

    from rlhf_core import cli

    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    sys.argv = ["rlhf", *arguments]
    cli.main()
