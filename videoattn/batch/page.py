"""The report's page: one file without scripts or links to anything but the clips beside it."""

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>videoattn batch: {{ done }} of {{ entries|length }} done</title>
<style>
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --bad: #c62828; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; }
.facts { color: #888; margin: 0 0 1rem; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .15rem .9rem .15rem 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
details { margin: .8rem 0; }
article { display: grid; grid-template-columns: 240px 1fr; gap: 1rem; padding: 1rem 0;
          border-top: 1px solid var(--line); }
article img { max-width: 100%; border-radius: 4px; display: block; }
article h2 { font-size: 1rem; margin: 0; overflow-wrap: anywhere; }
article p { margin: .25rem 0; overflow-wrap: anywhere; }
.none { background: var(--soft); border-radius: 4px; min-height: 5rem; display: grid; place-items: center; }
.failed { color: var(--bad); }
.chips span { display: inline-block; background: var(--soft); border-radius: 3px; padding: 0 .4rem;
              margin: .1rem .25rem .1rem 0; }
@media (max-width: 40rem) { article { grid-template-columns: 1fr; } }
</style>
</head>
<body>
<h1>{{ done }} of {{ entries|length }} clips done
{% if failed %}, <span class="failed">{{ failed }} failed</span>{% endif %}</h1>
<p class="facts">{{ seconds|duration }} of rendering, model loading left out.
Written {{ written }} by videoattn {{ version }}.</p>
{% if stages %}
<table>
<tr><th>stage</th><th class="number">seconds</th><th class="number">share</th></tr>
{% for stage, seconds, share in stages %}
<tr><td>{{ stage }}</td><td class="number">{{ "%.1f"|format(seconds) }}</td>
<td class="number">{{ "%.0f"|format(share * 100) }} %</td></tr>
{% endfor %}
</table>
{% endif %}
<details><summary>Settings that all clips share</summary>
<table>
{% for name, value in common.items() %}
<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}
</table>
</details>
{% for entry in entries %}
<article id="{{ entry.name }}">
{% if entry.poster %}
<a href="{{ entry.clip|urlencode }}">
<img src="{{ entry.poster }}" alt="poster of {{ entry.name }}" loading="lazy"></a>
{% else %}
<div class="none">{{ entry.state }}</div>
{% endif %}
<div>
<h2>{% if entry.clip %}<a href="{{ entry.clip|urlencode }}">{{ entry.name }}</a>
{%- else %}{{ entry.name }}{% endif %}</h2>
<p>{{ entry.settings.prompt }}</p>
<p class="chips"><span>seed {{ entry.settings.seed }}</span>
{% for name in varying if entry.settings[name] is not none and entry.settings[name] != "" %}
<span>{{ name }} {{ entry.settings[name] }}</span>
{% endfor %}
</p>
{% if entry.error %}
<p class="failed">{{ entry.state }} after {{ entry.attempts }} attempt{{ "s" if entry.attempts != 1 }}:
{{ entry.error }}
{% if entry.row %}({{ entry.file }} row {{ entry.row }}){% endif %}</p>
{% endif %}
{% for warning in entry.warnings %}
<p>warning: {{ warning }}</p>
{% endfor %}
{% if entry.stages %}
<p>{% for stage, seconds in entry.stages.items() %}
{{ stage }} {{ "%.2f"|format(seconds) }} s{{ "," if not loop.last }}
{% endfor %}
{% if entry.total_seconds %}· {{ "%.2f"|format(entry.total_seconds) }} s in all{% endif %}</p>
{% endif %}
{% if entry.attention_share is not none %}
<p>attention {{ "%.0f"|format(entry.attention_share * 100) }} % of the time
{{ "(estimate)" if entry.share_is_estimate }}
{% for arm, ratio in entry.ratios.items() %}
{% if ratio is not none %}· {{ arm }} takes {{ "%.2f"|format(ratio) }}× as long{% endif %}
{% endfor %}
{% if entry.log %}· <a href="{{ entry.log|urlencode }}">every call</a>{% endif %}</p>
{% endif %}
{% if entry.kernels %}
<p class="chips">
{% for kind, kernel in entry.kernels.items() %}
<span>{{ kind }} {{ kernel }}</span>
{% endfor %}</p>
{% endif %}
</div>
</article>
{% endfor %}
</body>
</html>
"""
