"""The page at /: its script, run by Node in place of a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files

import pytest

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
BROWSER = """
class Element {
  constructor() {
    Object.assign(this, {listeners: {}, children: [], style: {}, value: "", hidden: true, checked: true});
    this.classList = {toggle() {}};
  }
  addEventListener(name, heed) { this.listeners[name] = heed; }
  append(...more) { this.children.push(...more); }
  prepend() {}
  replaceChildren(...now) { this.children = now; }
  querySelector() { return null; }
  requestSubmit() { this.listeners.submit({preventDefault() {}}); }
}
const elements = {}, asked = [];
globalThis.document = {getElementById: id => elements[id] ??= new Element(), createElement: () => new Element()};
globalThis.setInterval = () => {};
const CHUNK = {choices: [{delta: {content: "Hello"}, sources: [{token: "Hello", source: "head"}]}]};
const ANSWERS = {
  "v1/models": JSON.stringify({data: [{id: "tiny", max_model_len: 64}]}),
  "prompts": JSON.stringify({tokens: 0, cached: 0, changes: [], reading: []}),
  "v1/chat/completions": `data: ${JSON.stringify(CHUNK)}\\n\\ndata: [DONE]\\n\\n`,
};
globalThis.fetch = async (path, {signal, method}) => {
  if (method) asked.push(path);
  if (path in ANSWERS) return new Response(ANSWERS[path]);
  return PLAIN(signal);
};
const settled = () => new Promise(resolve => setTimeout(resolve, 50));
const press = isComposing => at("question").listeners.keydown({key: "Enter", isComposing, preventDefault() {}});
const parts = () => at("talk").children.flatMap(turn => turn.children);
const seen = () => ({asked, button: at("send").textContent, said: messages.map(one => one.content),
                     errors: parts().filter(part => part.className === "error").length});
"""


def shown(plain: str, steps: str) -> dict[str, object]:
    """Return what the page has asked and shows after these steps. plain: how plain decoding is answered."""
    page = files("engine.server").joinpath("page.html").read_text("utf8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    run = f"(async () => {{ await settled(); {steps}; console.log(JSON.stringify(seen())); process.exit(); }})();"
    code = "\n".join([BROWSER, f"const PLAIN = {plain};", script, run])
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


SEND = 'at("question").value = "Hi"; press(false); await settled()'
BOTH = ["v1/chat/completions", "v1/completions"]
NEVER = """signal => new Promise((_, reject) => signal?.addEventListener("abort", () => reject(signal.reason)))"""


def test_plain_decoding_is_measured_after_the_answer_and_stop_ends_that() -> None:
    measuring = shown(NEVER, SEND)
    assert (measuring["asked"], measuring["button"]) == (BOTH, "Stop")
    stopped = shown(NEVER, f"{SEND}; at('form').requestSubmit(); await settled()")
    assert stopped == {"asked": BOTH, "button": "Send", "said": ["Hi", "Hello"], "errors": 0}


def test_an_error_of_the_measurement_is_not_shown_in_place_of_the_answer() -> None:
    refused = shown('async () => new Response("{}", {status: 500})', SEND)
    assert refused == {"asked": BOTH, "button": "Send", "said": ["Hi", "Hello"], "errors": 0}


def test_an_enter_that_confirms_an_input_method_sends_nothing() -> None:
    written = shown(NEVER, 'at("question").value = "にほ"; press(true); await settled()')
    assert written["asked"] == [] and written["said"] == []
