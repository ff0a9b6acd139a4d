// node transformers_js.mjs FOLDER DTYPE < REQUEST: what transformers.js computes with a directory,
// as JSON on the last line. REQUEST names a class and its inputs, or a pipeline and its text.
import * as transformers from '@huggingface/transformers';
import fs from 'node:fs';
import path from 'node:path';

const [folder, dtype] = process.argv.slice(2);
const request = JSON.parse(fs.readFileSync(0, 'utf8'));
transformers.env.allowRemoteModels = false;
transformers.env.localModelPath = path.dirname(folder) + '/';
const name = path.basename(folder);
const options = { dtype, device: 'cpu' };

let result;
if (request.task) {
  const run = await transformers.pipeline(request.task, name, options);
  result = await run(request.text, request.options);
} else {
  const model = await transformers[request.class].from_pretrained(name, options);
  const inputs = {};
  for (const [key, { type, data, dims }] of Object.entries(request.inputs)) {
    const values = type === 'int64' ? BigInt64Array.from(data, BigInt)
      : type === 'bool' ? Uint8Array.from(data, Number) : Float32Array.from(data);
    inputs[key] = new transformers.Tensor(type, values, dims);
  }
  const found = request.options
    ? await model.generate({ ...inputs, ...request.options })
    : (await model(inputs))[request.output];
  result = { dims: found.dims, data: Array.from(found.data, Number) };
}
console.log(JSON.stringify(result));
