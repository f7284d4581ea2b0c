/* Run the search's worker in a hidden frame where pages are opened from disk: browsers start no
   Worker from file:// addresses. With a server this file does nothing. */
(() => {
  if (location.protocol !== "file:") return;
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inner = this.frame.contentDocument;
      this.ready = new Promise((resolve) => {
        inner.open();
        inner.write("<!doctype html><body></body>");
        inner.close();
        const scope = this.frame.contentWindow;
        scope.postMessage = (data) =>
          this.dispatchEvent(new MessageEvent("message", { data }));
        scope.importScripts = () => {};
        const script = inner.createElement("script");
        script.src = url;
        script.onload = resolve;
        inner.body.appendChild(script);
      });
    }
    postMessage(data) {
      this.ready.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
})();
