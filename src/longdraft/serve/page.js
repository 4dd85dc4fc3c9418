"use strict";
const $ = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter(Boolean));
  return element;
};
const button = (textContent, onclick) => make("button", { type: "button", textContent, onclick });
const formatNumber = (x, digits = 0) => x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const plural = (n, noun) => `${formatNumber(n)} ${noun}${n === 1 ? "" : "s"}`;
const estimateTokens = (text) => Math.ceil(text.length / 4); // about four characters a token in English
const showNotice = (text) => { $("notice").textContent = text; };
const readSession = (name) => JSON.parse(sessionStorage.getItem(name));

/* A turn: {system, question, documents: [{name, size, text}], answers: [answer, ...]}; the last answer with text is sent as history.
   An answer's state is "running", "done", "stopped" or "failed"; rounds are the server's traces; thought is the reasoning. */
let turns = readSession("turns") ?? [];
let model = null;        // the entry of /v1/models
let documents = [];      // the documents of the next turn
let editing = null;      // the turn whose question is in the box: sending replaces this turn and all later ones
let running = null;      // AbortController of the streaming answer
const views = new Map(); // answer -> its element

/* ---- The server ---- */

const apiError = (message, status = 0) => Object.assign(new Error(message), { status });

async function fetchApi(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : apiError("The server cannot be reached.");
  });
  if (response.ok) return response;
  const message = (await response.json().catch(() => null))?.error?.message;
  throw apiError(message ?? `The server answered ${response.status} ${response.statusText}.`, response.status);
}

async function stream(answer, messages, signal) {
  const { method, temperature, seed, max_tokens } = answer;
  const body = JSON.stringify({
    model: model?.id, messages, temperature, seed, ...(max_tokens && { max_tokens }), ...(method && { method }),
    stream: true, stream_options: { include_usage: true, include_trace: true },
  });
  const response = await fetchApi("v1/chat/completions", { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value } = await reader.read().catch((error) => { if (signal.aborted) throw error; return {}; });
    if (value === undefined) throw apiError("The connection ended before the answer did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data:")) addChunk(answer, JSON.parse(line.slice(5)));
    }
    showAnswerSoon(answer);
  }
}

/* Adds a chunk of the stream to the answer. */
function addChunk(answer, { error, trace, choices, usage }) {
  if (error) throw apiError(error.message);
  if (trace?.phase === "prefill") answer.prefill = trace;
  if (trace?.phase === "round") answer.rounds.push(trace);
  answer.text += choices[0]?.delta?.content ?? "";
  answer.thought += choices[0]?.delta?.reasoning_content ?? "";
  answer.finish = choices[0]?.finish_reason ?? answer.finish;
  answer.usage = usage ?? answer.usage;
}

async function loadModels() {
  try {
    model = (await (await fetchApi("v1/models")).json()).data[0];
    showNotice("");
  } catch (error) {
    showNotice(error.message);
    if (error.status === 401) askForKey();
  }
  const methods = model?.longdraft?.methods ?? [], savedMethod = readSession("settings")?.method;
  $("method").replaceChildren(...methods.map((name) => make("option", { value: name, textContent: name })));
  $("method").value = methods.includes(savedMethod) ? savedMethod : (methods[0] ?? "");
  $("model").textContent = [model?.id, model?.longdraft?.exact && "exact output"].filter(Boolean).join(" · ");
  showContextUse();
}

/* ---- Asking ---- */

/* The request's messages: a turn's question after the earlier turns that have an answer. */
function messagesOf(turn, earlierTurns) {
  const user = (t) => ({ role: "user", content: [...t.documents.map((d) => d.text), t.question].join("\n\n") });
  const answerOf = (t) => t.answers.findLast((answer) => answer.text);
  const history = earlierTurns.filter(answerOf).flatMap((t) => [user(t), { role: "assistant", content: answerOf(t).text }]);
  return [...(turn.system ? [{ role: "system", content: turn.system }] : []), ...history, user(turn)];
}

/* Streams an answer to a turn. extraMessages: the start of the answer, to be continued. */
async function answerTurn(turn, answer, ...extraMessages) {
  running = new AbortController();
  Object.assign(answer, { state: "running", began: Date.now(), prefill: null, error: "", finish: null });
  showConversation();
  const clock = setInterval(() => !answer.text && showAnswer(answer), 1000);
  try {
    await stream(answer, [...messagesOf(turn, turns.slice(0, turns.indexOf(turn))), ...extraMessages], running.signal);
    answer.state = "done";
  } catch (error) {
    Object.assign(answer, { state: error.name === "AbortError" ? "stopped" : "failed", error: error.message });
    if (error.status >= 400 && error.status < 500) restoreToBox(turn, error);
  }
  clearInterval(clock);
  running = null;
  showConversation();
  save();
}

/* Puts a message that the server refused (too long, too busy, no key, a wrong setting) back into the box. */
function restoreToBox(turn, error) {
  if (error.status === 401) askForKey();
  if (turn !== turns.at(-1) || turn.answers.some((answer) => answer.text)) return;
  turns.pop();
  fillBox($("question").value || turn.question, [...turn.documents, ...documents]);
  showNotice(error.message);
}

/* Fills the box with a message to be edited and sent. */
function fillBox(question, files, turn = null) {
  [$("question").value, documents, editing] = [question, [...files], turn];
  showNotice(turn ? "Sending replaces this question and all that follows it; Esc leaves it as it is." : "");
  showDocuments();
  $("question").focus();
}

function send() {
  const question = $("question").value.trim();
  if (running || !(question || documents.length)) return;
  const turn = { system: $("system").value.trim(), question, documents, answers: [] };
  const earlierTurns = editing ? turns.slice(0, turns.indexOf(editing)) : turns;
  if (!startAnswer(turn, [...earlierTurns, turn])) return;
  fillBox("", []);
  $("log").scrollTo(0, $("log").scrollHeight);
}

/* Starts the first or a further answer to a turn. Returns false if a setting is wrong. */
function startAnswer(turn, conversation = turns) {
  const settings = running ? null : readSettings();
  if (!settings) return false;
  turns = conversation;
  const answer = { ...settings, rounds: [], text: "", thought: "", usage: null };
  turn.answers = [...turn.answers.filter((other) => other.state !== "failed"), answer];
  answerTurn(turn, answer);
  return true;
}

/* ---- The conversation ---- */

const escapeHtml = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
// HTML that a model writes is shown as text, and images are not fetched.
marked.use({ renderer: { html: ({ text }) => escapeHtml(text), image: ({ href, text }) => escapeHtml(text || href) } });

function markdown(text) {
  const element = make("div", { className: "text" }, DOMPurify.sanitize(marked.parse(text), { RETURN_DOM_FRAGMENT: true }));
  for (const block of element.querySelectorAll("p, li, h1, h2, h3, h4, h5, h6, blockquote, td, th")) block.dir = "auto";
  for (const link of element.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const code of element.querySelectorAll("pre > code")) code.after(copyButton(code.textContent));
  return element;
}

/* The clipboard API needs localhost or https; elsewhere a selection is copied. */
async function copyText(text) {
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
  const element = button("Copy", async () => {
    const done = await copyText(text);
    element.textContent = done ? "Copied" : "Not allowed";
    setTimeout(() => { element.textContent = "Copy"; }, 2000);
  });
  return element;
}

/* The answer as Markdown, with its reasoning folded. */
function answerElements(answer) {
  const fold = make("details", { open: answer.unfolded ?? false, ontoggle: () => { answer.unfolded = fold.open; } });
  fold.append(make("summary", { textContent: answer.text ? "Thought" : "Thinking …" }), markdown(answer.thought));
  return [answer.thought.trim() && fold, answer.text && markdown(answer.text)];
}

/* The tokens, coloured by who proposed them; a click shows the tree of their round. */
function tokenElements(answer) {
  const tokens = make("div", { className: "pieces", dir: "auto" }), tree = make("pre", { tabIndex: 0, hidden: true });
  for (const round of answer.rounds) {
    for (const [textContent, source] of round.pieces) {
      const piece = make("span", { className: `piece ${source}`, textContent, title: roundTitle(round) });
      piece.onclick = () => {
        for (const old of tokens.querySelectorAll(".chosen")) old.classList.remove("chosen");
        piece.classList.add("chosen");
        Object.assign(tree, { hidden: false, textContent: [roundTitle(round), ...treeLines(round.tree)].join("\n") });
      };
      tokens.append(piece);
    }
  }
  return [tokens, tree];
}

function roundTitle({ round, tree }) {
  const drafted = (tree?.tokens.length ?? 1) - 1, accepted = (tree?.accepted.length ?? 1) - 1;
  if (!round) return "The first token: reading the prompt gave it.";
  return `Round ${formatNumber(round)}: ${drafted ? `${accepted} of ${plural(drafted, "drafted token")} accepted` : "nothing was drafted"}.`;
}

/* A tree as lines: ● accepted, ○ rejected; branches off the accepted path are indented. */
function treeLines(tree, node = 0, depth = 0) {
  if (!tree) return [];
  const isAccepted = (i) => tree.accepted.includes(i), children = tree.parents.flatMap((parent, i) => (parent === node ? [i] : []));
  const mainChild = children.find(isAccepted) ?? children.at(-1); // not indented
  const line = `${"  ".repeat(depth)}${isAccepted(node) ? "●" : "○"} ${JSON.stringify(tree.tokens[node])} ${node ? tree.sources[node] : ""}`;
  return [line, ...children.flatMap((i) => (i === mainChild ? [] : treeLines(tree, i, depth + 1))), ...(mainChild ? treeLines(tree, mainChild, depth) : [])];
}

function footer(answer, first) {
  const lastRound = answer.rounds.findLast((round) => round.tokens_per_second), usage = answer.usage;
  const cached = usage?.prompt_tokens_details?.cached_tokens, isRepeat = answer !== first && answer.state !== "running";
  return [
    answer.state === "stopped" && "Stopped", answer.finish === "length" && "Cut off at the limit of tokens, or by the server's timeout",
    lastRound && `${formatNumber(lastRound.tokens_per_second, 1)} tokens/s · mean accepted length ${formatNumber(lastRound.mean_accepted_length, 2)}`,
    usage && `${plural(usage.completion_tokens, "token")} · prompt ${plural(usage.prompt_tokens, "token")}`,
    cached && `${formatNumber(cached)} from the cache`,
    isRepeat && `the text ${answer.text === first.text ? "equals" : "differs from"} the first answer's`,
  ].filter(Boolean).join(" · ");
}

/* Shows the progress of the prefill, and the seconds so far. */
function prefillProgress({ prefill, began }) {
  const text = `Reading the prompt: ${prefill ? `${formatNumber(prefill.read)} of ${plural(prefill.of, "token")}, ` : ""}${plural(Math.round((Date.now() - began) / 1000), "second")}`;
  return [text, make("progress", { ariaLabel: "Prompt read", ...(prefill && { max: prefill.of, value: prefill.read }) })];
}

function showAnswer(answer) {
  const turn = turns.find((t) => t.answers.includes(answer)), view = views.get(answer);
  if (!turn || !view) return;
  const distanceToEnd = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight; // in pixels; near it (120), the page follows the text
  const busy = answer.state === "running", isWaiting = busy && !answer.text && !answer.thought;
  const heading = `${answer.method || "default method"} · ${answer.temperature ? `temperature ${answer.temperature}` : "greedy"}, seed ${answer.seed}`;
  const tools = busy ? [] : [
    answer.text && copyButton(answer.text), button(answer.state === "failed" ? "Try again" : "Again", () => startAnswer(turn)),
    answer.finish === "length" && answer.text && button("Continue", () => running || answerTurn(turn, answer, { role: "assistant", content: answer.text })),
    answer.rounds.length && button(answer.showsSources ? "As text" : "Who wrote it", () => { answer.showsSources = !answer.showsSources; showAnswer(answer); }),
  ];
  view.ariaBusy = String(busy);
  view.replaceChildren(
    make("small", { textContent: heading }), ...(answer.showsSources ? tokenElements(answer) : answerElements(answer)).filter(Boolean),
    make("div", { role: "status" }, ...(isWaiting ? prefillProgress(answer) : [])),
    ...(answer.state === "failed" ? [make("p", { className: "failed", role: "alert", textContent: answer.error })] : []),
    make("small", { className: "figures", textContent: footer(answer, turn.answers[0]) }), make("div", { className: "row" }, ...tools),
  );
  if (distanceToEnd < 120) $("log").scrollTo(0, $("log").scrollHeight);
}

/* Redraws a growing answer after a frame (16 ms). Then waits nine times as long as the drawing took. */
let redrawTimer = 0;
function showAnswerSoon(answer) {
  redrawTimer ||= setTimeout(() => {
    const began = performance.now();
    showAnswer(answer);
    redrawTimer = setTimeout(() => { redrawTimer = 0; if (answer.state === "running") showAnswerSoon(answer); }, 9 * (performance.now() - began));
  }, 16);
}

function showConversation() {
  $("empty").hidden = turns.length > 0;
  for (const old of document.querySelectorAll(".turn")) old.remove();
  views.clear();
  for (const turn of turns) {
    for (const answer of turn.answers) views.set(answer, make("article", { className: "answer" }));
    const edit = button("Edit", () => running || fillBox(turn.question, turn.documents, turn));
    $("log").append(make("section", { className: "turn" },
      make("div", { className: "question" }, make("ul", { className: "row" }, ...turn.documents.map((d) => chip(d))),
        make("p", { textContent: turn.question, dir: "auto" }), make("div", { className: "row" }, edit)),
      make("div", { className: "answers" }, ...turn.answers.map((answer) => views.get(answer)))));
    turn.answers.forEach(showAnswer);
  }
  $("send").textContent = running ? "Stop" : "Send";
  showContextUse();
}

/* ---- Documents ---- */

const MAX_FILE_BYTES = 20e6;
function chip(file, remove) {
  const textContent = `${file.name} · ${formatNumber(file.size / 1000, 1)} kB · about ${plural(estimateTokens(file.text), "token")} `;
  return make("li", { textContent }, remove && Object.assign(button("✕", remove), { ariaLabel: `Remove ${file.name}` }));
}

async function addFiles(files) {
  const wrong = [];
  for (const file of files) {
    const text = file.size < MAX_FILE_BYTES && (await file.arrayBuffer().then((bytes) => new TextDecoder("utf-8", { fatal: true }).decode(bytes)).catch(() => null));
    if (file.size >= MAX_FILE_BYTES) wrong.push(`${file.name} is too large: a document may have 20 MB at most.`);
    else if (text === null || text.includes("\0")) wrong.push(`${file.name} is not a text file in UTF-8.`);
    else documents.push({ name: file.name, size: file.size, text });
  }
  showNotice(wrong.join(" "));
  showDocuments();
  $("question").focus();
}

function showDocuments() {
  const remover = (file) => () => { documents = documents.filter((other) => other !== file); showDocuments(); };
  $("documents").replaceChildren(...documents.map((file) => chip(file, remover(file))));
  showContextUse();
}

/* Estimates how much of the context the next question takes. */
function showContextUse() {
  const context = model?.longdraft?.context, box = { system: $("system").value, question: $("question").value, documents };
  const earlierTurns = editing ? turns.slice(0, turns.indexOf(editing)) : turns;
  const tokens = messagesOf(box, earlierTurns).reduce((sum, message) => sum + estimateTokens(message.content), 0);
  $("context-use").textContent = context && tokens ? `about ${formatNumber(tokens)} of ${plural(context, "token")}` : "";
  $("context-use").classList.toggle("over", tokens > context);
}

/* ---- Settings and conversation, saved until the tab closes ---- */

const FIELDS = ["method", "temperature", "seed", "max_tokens", "system"];

/* The settings of the next answer. If one is wrong, shows its field and returns null. */
function readSettings() {
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

/* Saves the conversation with its rounds, or without them if they exceed the browser's limit. */
function save() {
  for (const replacer of [undefined, (name, value) => (name === "rounds" ? [] : value)]) {
    try {
      return sessionStorage.setItem("turns", JSON.stringify(turns, replacer));
    } catch { /* Over the limit: tries without the rounds. */ }
  }
  sessionStorage.removeItem("turns");
  return showNotice("This conversation is too long to be kept when the page is loaded again.");
}

/* ---- Events ---- */

$("composer").onsubmit = (event) => {
  event.preventDefault();
  if (running) running.abort();
  else send();
};
$("question").onkeydown = (event) => {
  // An Enter that ends an input method's composition sends nothing; in Safari only keyCode 229 tells.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  send();
};
$("question").oninput = showContextUse;
$("files").onchange = () => addFiles([...$("files").files]).then(() => { $("files").value = ""; });
$("new").onclick = () => {
  running?.abort();
  [turns, editing] = [[], null];
  save();
  showConversation();
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
  if (editing) fillBox("", []);
};
document.ondragover = (event) => event.preventDefault();
document.ondrop = (event) => {
  event.preventDefault();
  addFiles([...event.dataTransfer.files]);
};
addEventListener("pagehide", save);

for (const [id, value] of Object.entries(readSession("settings") ?? {})) $(id).value = value;
$("key").value = sessionStorage.getItem("key") ?? "";
for (const answer of turns.flatMap((turn) => turn.answers)) if (answer.state === "running") answer.state = "stopped";
showConversation();
loadModels();
$("question").focus();
