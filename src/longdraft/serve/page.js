"use strict";
const $ = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter(Boolean));
  return element;
};
const button = (textContent, onclick) => make("button", { type: "button", textContent, onclick });
const number = (x, digits = 0) => x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const plural = (n, noun) => `${number(n)} ${noun}${n === 1 ? "" : "s"}`;
const aboutTokens = (text) => Math.ceil(text.length / 4);
const notice = (text) => { $("notice").textContent = text; };
const read = (name) => JSON.parse(sessionStorage.getItem(name));

/* A turn: {system, question, documents: [{name, size, text}], answers: [answer, ...]}; the conversation goes on from its
   last answer. An answer's state is "running", "done", "stopped" or "failed"; its rounds are the server's traces. */
let turns = read("turns") ?? [];
let model = null;        // as /v1/models describes it
let documents = [];      // of the next turn
let editing = null;      // turn whose question is in the box: sending replaces it and all that follows
let running = null;      // AbortController of the answer that streams
const views = new Map(); // answer -> its element

/* ---- The server ---- */

const failure = (message, status = 0) => Object.assign(new Error(message), { status });

async function call(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : failure("The server cannot be reached.");
  });
  if (response.ok) return response;
  const message = (await response.json().catch(() => null))?.error?.message;
  throw failure(message ?? `The server answered ${response.status} ${response.statusText}.`, response.status);
}

async function stream(answer, messages, signal) {
  const { method, temperature, seed, max_tokens } = answer;
  const body = JSON.stringify({
    model: model?.id, messages, temperature, seed, ...(max_tokens && { max_tokens }), ...(method && { method }),
    stream: true, stream_options: { include_usage: true, include_trace: true },
  });
  const response = await call("v1/chat/completions", { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value } = await reader.read().catch((error) => { if (signal.aborted) throw error; return {}; });
    if (value === undefined) throw failure("The connection ended before the answer did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data:")) take(answer, JSON.parse(line.slice(5)));
    }
    showSoon(answer);
  }
}

/* A chunk of the stream. */
function take(answer, { error, trace, choices, usage }) {
  if (error) throw failure(error.message);
  if (trace?.phase === "prefill") answer.read = trace;
  if (trace?.phase === "round") answer.rounds.push(trace);
  answer.text += choices[0]?.delta?.content ?? "";
  answer.thought += choices[0]?.delta?.reasoning_content ?? "";
  answer.finish = choices[0]?.finish_reason ?? answer.finish;
  answer.usage = usage ?? answer.usage;
}

async function loadModels() {
  try {
    model = (await (await call("v1/models")).json()).data[0];
    notice("");
  } catch (error) {
    notice(error.message);
    if (error.status === 401) askForKey();
  }
  const methods = model?.longdraft?.methods ?? [], wanted = read("settings")?.method;
  $("method").replaceChildren(...methods.map((name) => make("option", { value: name, textContent: name })));
  $("method").value = methods.includes(wanted) ? wanted : (methods[0] ?? "");
  $("model").textContent = [model?.id, model?.longdraft?.exact && "exact output"].filter(Boolean).join(" · ");
  showRoom();
}

/* ---- Asking ---- */

function messagesOf(turn, before) {
  const user = (t) => ({ role: "user", content: [...t.documents.map((d) => d.text), t.question].join("\n\n") });
  const said = (t) => t.answers.findLast((answer) => answer.text);
  const earlier = before.filter(said).flatMap((t) => [user(t), { role: "assistant", content: said(t).text }]);
  return [...(turn.system ? [{ role: "system", content: turn.system }] : []), ...earlier, user(turn)];
}

async function answerTurn(turn, answer, ...further) {
  running = new AbortController();
  Object.assign(answer, { state: "running", began: Date.now(), read: null, error: "", finish: null });
  showAll();
  const clock = setInterval(() => !answer.text && show(answer), 1000);
  try {
    await stream(answer, [...messagesOf(turn, turns.slice(0, turns.indexOf(turn))), ...further], running.signal);
    answer.state = "done";
  } catch (error) {
    Object.assign(answer, { state: error.name === "AbortError" ? "stopped" : "failed", error: error.message });
    if (error.status >= 400 && error.status < 500) refused(turn, error);
  }
  clearInterval(clock);
  running = null;
  showAll();
  save();
}

/* What the server did not take is in the box again: too long, too busy, no key, a wrong setting. */
function refused(turn, error) {
  if (error.status === 401) askForKey();
  if (turn !== turns.at(-1) || turn.answers.some((answer) => answer.text)) return;
  turns.pop();
  fill($("question").value || turn.question, [...turn.documents, ...documents]);
  notice(error.message);
}

/* What is in the box, to be sent next. */
function fill(question, files, turn = null) {
  [$("question").value, documents, editing] = [question, [...files], turn];
  notice(turn ? "Sending replaces this question and all that follows it; Esc leaves it as it is." : "");
  showDocuments();
  $("question").focus();
}

function send() {
  const question = $("question").value.trim();
  if (running || !(question || documents.length)) return;
  const turn = { system: $("system").value.trim(), question, documents, answers: [] };
  const kept = editing ? turns.slice(0, turns.indexOf(editing)) : turns;
  if (!ask(turn, [...kept, turn])) return;
  fill("", []);
  $("log").scrollTo(0, $("log").scrollHeight);
}

/* Has a turn of the conversation answered, once more perhaps, unless a setting is wrong. */
function ask(turn, conversation = turns) {
  const settings = running ? null : chosenSettings();
  if (!settings) return false;
  turns = conversation;
  const answer = { ...settings, rounds: [], text: "", thought: "", usage: null };
  turn.answers = [...turn.answers.filter((each) => each.state !== "failed"), answer];
  answerTurn(turn, answer);
  return true;
}

/* ---- The conversation ---- */

const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
// Markup that a model writes stays text, and nothing is fetched.
marked.use({ renderer: { html: ({ text }) => escaped(text), image: ({ href, text }) => escaped(text || href) } });

function markdown(text) {
  const made = make("div", { className: "text" }, DOMPurify.sanitize(marked.parse(text), { RETURN_DOM_FRAGMENT: true }));
  for (const block of made.querySelectorAll("p, li, h1, h2, h3, h4, h5, h6, blockquote, td, th")) block.dir = "auto";
  for (const link of made.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const code of made.querySelectorAll("pre > code")) code.after(copyButton(code.textContent));
  return made;
}

/* Browsers have a clipboard for pages of this machine and of https alone; elsewhere a selection is copied. */
async function copied(text) {
  if (await navigator.clipboard?.writeText(text).then(() => true, () => false)) return true;
  const box = make("textarea", { value: text }), before = document.activeElement;
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  before?.focus();
  return done;
}

function copyButton(text) {
  const made = button("Copy", async () => {
    const done = await copied(text);
    made.textContent = done ? "Copied" : "Not allowed";
    setTimeout(() => { made.textContent = "Copy"; }, 2000);
  });
  return made;
}

/* A thought is folded. */
function parts(answer) {
  const fold = make("details", { open: answer.unfolded ?? false, ontoggle: () => { answer.unfolded = fold.open; } });
  fold.append(make("summary", { textContent: answer.text ? "Thought" : "Thinking …" }), markdown(answer.thought));
  return [answer.thought.trim() && fold, answer.text && markdown(answer.text)];
}

/* Tokens in the colour of who proposed them; a click shows what their round drafted. */
function pieces(answer) {
  const shown = make("div", { className: "pieces", dir: "auto" }), tree = make("pre", { tabIndex: 0, hidden: true });
  for (const round of answer.rounds) {
    for (const [textContent, source] of round.pieces) {
      const piece = make("span", { className: `piece ${source}`, textContent, title: described(round) });
      piece.onclick = () => {
        for (const old of shown.querySelectorAll(".chosen")) old.classList.remove("chosen");
        piece.classList.add("chosen");
        Object.assign(tree, { hidden: false, textContent: [described(round), ...drawn(round.tree)].join("\n") });
      };
      shown.append(piece);
    }
  }
  return [shown, tree];
}

function described({ round, tree }) {
  const drafted = (tree?.tokens.length ?? 1) - 1, accepted = (tree?.accepted.length ?? 1) - 1;
  if (!round) return "The first token: reading the prompt gave it.";
  return `Round ${number(round)}: ${drafted ? `${accepted} of ${plural(drafted, "drafted token")} accepted` : "nothing was drafted"}.`;
}

/* A tree as lines: ● accepted, ○ not; a branch is indented, the accepted path is not. */
function drawn(tree, node = 0, depth = 0) {
  if (!tree) return [];
  const kept = (i) => tree.accepted.includes(i), children = tree.parents.flatMap((parent, i) => (parent === node ? [i] : []));
  const straight = children.find(kept) ?? children.at(-1);
  const own = `${"  ".repeat(depth)}${kept(node) ? "●" : "○"} ${JSON.stringify(tree.tokens[node])} ${node ? tree.sources[node] : ""}`;
  return [own, ...children.flatMap((i) => (i === straight ? [] : drawn(tree, i, depth + 1))), ...(straight ? drawn(tree, straight, depth) : [])];
}

function figures(answer, first) {
  const last = answer.rounds.findLast((round) => round.tokens_per_second), usage = answer.usage;
  const cached = usage?.prompt_tokens_details?.cached_tokens, other = answer !== first && answer.state !== "running";
  return [
    answer.state === "stopped" && "Stopped", answer.finish === "length" && "Cut at the most tokens, or by the server's limit of time",
    last && `${number(last.tokens_per_second, 1)} tokens/s · mean accepted length ${number(last.mean_accepted_length, 2)}`,
    usage && `${plural(usage.completion_tokens, "token")} · prompt ${plural(usage.prompt_tokens, "token")}`,
    cached && `${number(cached)} from the cache`,
    other && `the text ${answer.text === first.text ? "equals" : "differs from"} the first answer's`,
  ].filter(Boolean).join(" · ");
}

/* How far the prompt is read, from the first second on. */
function reading({ read, began }) {
  const text = `Reading the prompt: ${read ? `${number(read.read)} of ${plural(read.of, "token")}, ` : ""}${plural(Math.round((Date.now() - began) / 1000), "second")}`;
  return [text, make("progress", { ariaLabel: "Prompt read", ...(read && { max: read.of, value: read.read }) })];
}

function show(answer) {
  const turn = turns.find((each) => each.answers.includes(answer)), view = views.get(answer);
  if (!turn || !view) return;
  const below = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight;
  const busy = answer.state === "running", waits = busy && !answer.text && !answer.thought;
  const how = `${answer.method || "default method"} · ${answer.temperature ? `temperature ${answer.temperature}` : "greedy"}, seed ${answer.seed}`;
  const tools = busy ? [] : [
    answer.text && copyButton(answer.text), button(answer.state === "failed" ? "Try again" : "Again", () => ask(turn)),
    answer.finish === "length" && answer.text && button("Continue", () => running || answerTurn(turn, answer, { role: "assistant", content: answer.text })),
    answer.rounds.length && button(answer.colours ? "As text" : "Who wrote it", () => { answer.colours = !answer.colours; show(answer); }),
  ];
  view.ariaBusy = String(busy);
  view.replaceChildren(
    make("small", { textContent: how }), ...(answer.colours ? pieces(answer) : parts(answer)).filter(Boolean),
    make("div", { role: "status" }, ...(waits ? reading(answer) : [])),
    ...(answer.state === "failed" ? [make("p", { className: "failed", role: "alert", textContent: answer.error })] : []),
    make("small", { className: "figures", textContent: figures(answer, turn.answers[0]) }), make("div", { className: "row" }, ...tools),
  );
  if (below < 120) $("log").scrollTo(0, $("log").scrollHeight);
}

/* Shows an answer that grows, with a tenth of the time at most. */
let due = 0;
function showSoon(answer) {
  due ||= setTimeout(() => {
    const began = performance.now();
    show(answer);
    due = setTimeout(() => { due = 0; if (answer.state === "running") showSoon(answer); }, 9 * (performance.now() - began));
  }, 16);
}

function showAll() {
  $("empty").hidden = turns.length > 0;
  for (const old of document.querySelectorAll(".turn")) old.remove();
  views.clear();
  for (const turn of turns) {
    for (const answer of turn.answers) views.set(answer, make("article", { className: "answer" }));
    const edit = button("Edit", () => running || fill(turn.question, turn.documents, turn));
    $("log").append(make("section", { className: "turn" },
      make("div", { className: "question" }, make("ul", { className: "row" }, ...turn.documents.map((d) => chip(d))),
        make("p", { textContent: turn.question, dir: "auto" }), make("div", { className: "row" }, edit)),
      make("div", { className: "answers" }, ...turn.answers.map((answer) => views.get(answer)))));
    turn.answers.forEach(show);
  }
  $("send").textContent = running ? "Stop" : "Send";
  showRoom();
}

/* ---- Documents ---- */

function chip(file, remove) {
  const textContent = `${file.name} · ${number(file.size / 1000, 1)} kB · about ${plural(aboutTokens(file.text), "token")} `;
  return make("li", { textContent }, remove && Object.assign(button("✕", remove), { ariaLabel: `Remove ${file.name}` }));
}

async function addFiles(files) {
  const wrong = [];
  for (const file of files) {
    const text = file.size < 20e6 && (await file.arrayBuffer().then((bytes) => new TextDecoder("utf-8", { fatal: true }).decode(bytes)).catch(() => null));
    if (file.size >= 20e6) wrong.push(`${file.name} is too large: a document may have 20 MB.`);
    else if (text === null || text.includes("\0")) wrong.push(`${file.name} is not a text file in UTF-8.`);
    else documents.push({ name: file.name, size: file.size, text });
  }
  notice(wrong.join(" "));
  showDocuments();
  $("question").focus();
}

function showDocuments() {
  const removed = (file) => () => { documents = documents.filter((other) => other !== file); showDocuments(); };
  $("documents").replaceChildren(...documents.map((file) => chip(file, removed(file))));
  showRoom();
}

/* About how much of the model's context the next question takes. */
function showRoom() {
  const context = model?.longdraft?.context, box = { system: $("system").value, question: $("question").value, documents };
  const before = editing ? turns.slice(0, turns.indexOf(editing)) : turns;
  const tokens = messagesOf(box, before).reduce((sum, message) => sum + aboutTokens(message.content), 0);
  $("room").textContent = context && tokens ? `about ${number(tokens)} of ${plural(context, "token")}` : "";
  $("room").classList.toggle("over", tokens > context);
}

/* ---- Settings, and what stays while the tab is open ---- */

const FIELDS = ["method", "temperature", "seed", "max_tokens", "system"];

/* What the next answer is asked with; null, and the wrong field shown, where one is wrong. */
function chosenSettings() {
  const numbers = ["temperature", "seed", "max_tokens"], wrong = numbers.map($).find((field) => !field.checkValidity());
  if (!wrong) return { method: $("method").value, ...Object.fromEntries(numbers.map((id) => [id, Number($(id).value)])) };
  $("settings").showModal();
  wrong.reportValidity();
  return null;
}

function askForKey() {
  if (!$("settings").open) $("settings").showModal();
  $("key").focus();
}

/* The conversation with what its rounds drafted; without that where it is too much for the browser. */
function save() {
  for (const kept of [undefined, (name, value) => (name === "rounds" ? [] : value)]) {
    try {
      return sessionStorage.setItem("turns", JSON.stringify(turns, kept));
    } catch { /* Full: once more with less. */ }
  }
  sessionStorage.removeItem("turns");
  return notice("This conversation is too long to be kept when the page is loaded again.");
}

/* ---- The frame ---- */

$("composer").onsubmit = (event) => {
  event.preventDefault();
  if (running) running.abort();
  else send();
};
$("question").onkeydown = (event) => {
  // An Enter that ends a composition (of an input method) sends nothing; Safari says so by 229 alone.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  send();
};
$("question").oninput = showRoom;
$("files").onchange = () => addFiles([...$("files").files]).then(() => { $("files").value = ""; });
$("new").onclick = () => {
  running?.abort();
  [turns, editing] = [[], null];
  save();
  showAll();
  $("question").focus();
};
$("open-settings").onclick = () => $("settings").showModal();
$("key").onchange = () => {
  sessionStorage.setItem("key", $("key").value.trim());
  loadModels();
};
for (const id of FIELDS) $(id).onchange = () => sessionStorage.setItem("settings", JSON.stringify(Object.fromEntries(FIELDS.map((id) => [id, $(id).value]))));
document.onkeydown = (event) => {
  if (event.key !== "Escape" || $("settings").open) return;
  running?.abort();
  if (editing) fill("", []);
};
document.ondragover = (event) => event.preventDefault();
document.ondrop = (event) => {
  event.preventDefault();
  addFiles([...event.dataTransfer.files]);
};
addEventListener("pagehide", save);

for (const [id, value] of Object.entries(read("settings") ?? {})) $(id).value = value;
$("key").value = sessionStorage.getItem("key") ?? "";
for (const answer of turns.flatMap((turn) => turn.answers)) if (answer.state === "running") answer.state = "stopped";
showAll();
loadModels();
$("question").focus();
