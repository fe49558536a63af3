// Search on pages that were opened from disk, where browsers start no worker: the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = Object.assign(document.createElement("iframe"), { hidden: true })
      document.body.append(frame)
      const inner = frame.contentWindow
      inner.postMessage = data => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })))
      const script = inner.document.createElement("script")
      this.loaded = new Promise(resolve => script.addEventListener("load", resolve))
      this.inner = inner
      script.src = url
      inner.document.body.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
