// Runs the steps of a client one after the other and prints their results as one JSON object. The first argument is the
// server's URL.
export const url = process.argv[2];

export const weather = {
  type: "object",
  properties: { place: { type: "string" } },
  required: ["place"],
  additionalProperties: false,
};

export const call = '!say <tool_call>{"name": "weather", "arguments": {"place": "Bonn"}}</tool_call>';

export async function report(steps) {
  const results = {};
  for (const [name, step] of Object.entries(steps)) results[name] = await step();
  console.log(JSON.stringify(results));
}

export async function refused(request) {
  try {
    await request();
  } catch (error) {
    return error;
  }
  throw new Error("the request was not refused");
}

// A WAV file of silence: 100 ms at 16 kHz, 16 bits, one channel.
export function recording() {
  const samples = 1600;
  const file = Buffer.alloc(44 + 2 * samples);
  file.write("RIFF", 0);
  file.writeUInt32LE(36 + 2 * samples, 4);
  file.write("WAVEfmt ", 8);
  file.writeUInt32LE(16, 16);
  file.writeUInt16LE(1, 20);
  file.writeUInt16LE(1, 22);
  file.writeUInt32LE(16000, 24);
  file.writeUInt32LE(32000, 28);
  file.writeUInt16LE(2, 32);
  file.writeUInt16LE(16, 34);
  file.write("data", 36);
  file.writeUInt32LE(2 * samples, 40);
  return file;
}
