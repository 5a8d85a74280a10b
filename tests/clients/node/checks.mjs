// What the programs of Node's clients share: how checks run, and what they ask for.
import { z } from "zod";

export const BASE_URL = process.env.OPENAI_BASE_URL;
export const MODEL = "smollm2-135m-instruct";
export const QUESTION = "What is the weather in Oslo?";
export const CHAT = [{ role: "user", content: QUESTION }];
export const WEATHER = "It is 4 degrees and it rains."; // what the tool answers

export const Forecast = z.object({
  city: z.enum(["Berlin", "Lima", "Oslo"]),
  celsius: z.int().min(-30).max(45),
  rain: z.boolean(),
  warnings: z.array(z.enum(["storm", "heat", "ice"])).max(2),
});
export const WeatherQuery = z.object({
  city: z.enum(["Berlin", "Lima", "Oslo"]),
  unit: z.enum(["celsius", "fahrenheit"]),
});

const checks = [];

// Registers a check of the program. It fails if it throws.
export function check(name, run) {
  checks.push({ name, run });
}

// Runs the registered checks and prints each result as a line of JSON, and at the end the number of checks. Exits with
// 1 if one failed.
export async function run() {
  let passed = true;
  for (const { name, run } of checks) {
    const started = performance.now();
    const result = { check: name, passed: true };
    try {
      await run();
    } catch (error) {
      result.passed = passed = false;
      result.error = error?.stack ?? String(error);
    }
    result.seconds = Math.round((performance.now() - started) / 100) / 10;
    console.log(JSON.stringify(result));
  }
  console.log(JSON.stringify({ checks: checks.length }));
  process.exit(passed ? 0 : 1);
}
