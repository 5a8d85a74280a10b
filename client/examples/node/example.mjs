// Quire from Node: node example.mjs ADDRESS PROTOS SERVICE_CONFIG
//
// After `npm ci`. PROTOS are the folders of inference.proto and of google/rpc/error_details.proto, separated by ':'.

import { randomUUID } from "node:crypto";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import protobuf from "protobufjs";

const [address, folders, config] = process.argv.slice(2);
const includeDirs = folders.split(":");
const loaded = loadSync("quire/inference/v1/inference.proto", { includeDirs, keepCase: true, defaults: true, longs: Number });
const { InferenceService } = grpc.loadPackageDefinition(loaded).quire.inference.v1;

const errors = new protobuf.Root();
errors.resolvePath = (_, path) => includeDirs.map((folder) => join(folder, path)).find(existsSync) ?? path;
errors.loadSync(["google/rpc/status.proto", "google/rpc/error_details.proto"]);

const client = new InferenceService(address, grpc.credentials.createInsecure(), {
  "grpc.service_config": readFileSync(config, "utf8"),
});
const deadline = () => ({ deadline: Date.now() + 60_000 });

// A request for at most 16 tokens.
const generation = (fields = {}) => ({ text: "A quire is", stopping: { max_tokens: 16 }, ...fields });

// One response.
const generate = (fields) =>
  new Promise((resolve, reject) =>
    client.Generate({ generation: generation(fields) }, deadline(), (error, response) =>
      error ? reject(error) : resolve(response),
    ),
  );

const response = await generate({ sampling: { temperature: 0 } });
console.log("generated:", response.completions[0].text);

// Chunks as they come, between the acceptance and the usage.
let text = "";
for await (const message of client.StreamGenerate({ generation: generation() }, deadline())) {
  text += message.chunk?.text ?? "";
}
console.log("streamed:", text);

// An error: its code, its reason, and the field at fault.
try {
  await generate({ sampling: { temperature: 9 } });
} catch (error) {
  const [status] = error.metadata.get("grpc-status-details-bin");
  const details = {};
  for (const detail of errors.lookupType("google.rpc.Status").decode(status).details) {
    const name = detail.type_url.split("/").pop();
    details[name] = errors.lookupType(name).decode(detail.value);
  }
  const { field } = details["google.rpc.BadRequest"].fieldViolations[0];
  console.log("error:", grpc.status[error.code], details["google.rpc.ErrorInfo"].reason, field);
}

// A stream that breaks, and its rest: a request with a name can be resumed, on any gateway.
const request_id = randomUUID();
const call = client.StreamGenerate({ generation: generation({ request_id }) }, deadline());
call.on("error", () => {}); // that it was cancelled
let chunk;
for await (const message of call) {
  if ((chunk = message.chunk)) break;
}
call.cancel();
const positions = [{ index: 0, next_offset: chunk.offset + chunk.token_ids.length }];
let rest = "";
for await (const message of client.Resume({ request_id, positions }, deadline())) {
  rest += message.chunk?.text ?? "";
}
console.log(`resumed: ${chunk.text}|${rest}`);
client.close();
