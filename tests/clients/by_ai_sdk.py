"""The AI SDK: sessions with a tool, of several steps and questions, streamed, by three of its models."""

from __future__ import annotations

import shutil

from program import MODEL, PROGRAMS, URL, folder, run

(folder / "node_modules").symlink_to(PROGRAMS.parent)
(folder / "talk.mjs").write_text("""
import assert from 'node:assert';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [model, baseURL] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: 'none' });
const compatible = createOpenAICompatible({ name: 'longdraft', baseURL, apiKey: 'none', includeUsage: true });
const weather = tool({ description: 'The weather in a city', inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `Sunny in ${city}, 21 degrees` });
for (const chosen of [compatible(model), openai.chat(model), openai.responses(model)]) {
  const messages = [];
  for (const [turn, question] of ['What is the weather in Paris?', 'And in Rome?', 'Which is warmer?'].entries()) {
    messages.push({ role: 'user', content: question });
    const result = streamText({
      model: chosen, messages, tools: { weather }, maxRetries: 0, maxOutputTokens: 128, temperature: 0,
      system: 'Answer questions about the weather. Call the function, then answer in one short sentence.',
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? 'auto' : 'required' }),
      stopWhen: stepCountIs(2),
      onError: ({ error }) => { console.error(error.message, error.responseBody); process.exit(1); },
    });
    const steps = await result.steps;
    assert(steps[0].toolCalls.length && steps[1].finishReason !== 'error');
    for (const { usage } of turn ? steps : steps.slice(1))
      assert(usage.inputTokenDetails.cacheReadTokens > usage.inputTokens / 2, JSON.stringify(usage));
    if (steps.at(-1).finishReason === 'length') break;  // small models call until the limit
    messages.push(...(await result.response).messages);
  }
}
console.log('talked');
""")
node = shutil.which("node")
assert node
assert "talked" in run(node, "talk.mjs", MODEL, URL)
