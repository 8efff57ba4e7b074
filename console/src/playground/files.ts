/** The content of a file in base64. */
export async function base64(file: Blob): Promise<string> {
  const url = await dataUrl(file)
  return url.slice(url.indexOf(',') + 1)
}

export function dataUrl(file: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader()
    reader.onload = () => resolve(reader.result as string)
    reader.onerror = () => reject(reader.error)
    reader.readAsDataURL(file)
  })
}
