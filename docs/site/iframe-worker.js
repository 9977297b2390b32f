// Lets search work on pages that are opened as files. There a browser starts no worker, so the worker's script runs in a
// hidden frame that answers to the same calls. The name must contain "iframe-worker": else the site's generator adds a
// script of that name from another server.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.src = "about:blank";
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => setTimeout(() => this.onmessage && this.onmessage({ data }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        this.inside = inside;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      };
      script.onerror = (error) => this.onerror && this.onerror(error);
      inside.document.body.append(script);
    }
    postMessage(data) {
      if (this.inside) setTimeout(() => this.inside.onmessage({ data }));
      else this.waiting.push(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
