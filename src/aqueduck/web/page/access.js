// The token, questions before something is changed, and the requests that change it.

import { h, setText } from "./format.js";

const KEY = "aqueduck-token";
const $ = (id) => document.getElementById(id);

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
  header: () => (token.get() ? { Authorization: `Bearer ${token.get()}` } : {}),
};

// Resolves to whether there is a token that the server takes.
export function askForToken(text) {
  const dialog = $("token-dialog");
  if (dialog.open) return Promise.resolve(false);
  setText($("token-text"), text);
  setText($("token-wrong"), "");
  $("token-input").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const done = (good) => { cleanUp(); dialog.close(); resolve(good); };
    const cancel = () => done(false);
    const submit = async (event) => {
      event.preventDefault();
      const value = $("token-input").value.trim();
      try {
        const answer = await fetch("/api/v1/errors?limit=1", { headers: { Authorization: `Bearer ${value}` } });
        if (answer.ok) { token.set(value); done(true); return; }
        setText($("token-wrong"), "This is not the server's token.");
      } catch {
        setText($("token-wrong"), "The server does not answer.");
      }
      $("token-input").select();
    };
    const cleanUp = () => {
      $("token-form").removeEventListener("submit", submit);
      $("token-cancel").removeEventListener("click", cancel);
      dialog.removeEventListener("cancel", cancel);
    };
    $("token-form").addEventListener("submit", submit);
    $("token-cancel").addEventListener("click", cancel);
    dialog.addEventListener("cancel", cancel);
  });
}

export function confirm(title, text, yes, danger = false) {
  const dialog = $("ask");
  setText($("ask-title"), title);
  setText($("ask-text"), text);
  setText($("ask-yes"), yes);
  $("ask-yes").classList.toggle("danger", danger);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

// Ask, then POST; what the server says is shown either way.
export async function act(path, question) {
  if (!(await confirm(question.title, question.text, question.yes, question.danger))) return;
  try {
    const answer = await fetch(`/api/v1${path}`, { method: "POST", headers: token.header() });
    const body = await answer.json();
    if (answer.ok) toast(body.message, "good");
    else toast(body.error.hint ? `${body.error.message}. ${body.error.hint}` : body.error.message, "bad");
  } catch {
    toast("The server does not answer; nothing was changed.", "bad");
  }
}

export function toast(text, tone) {
  const element = h("p", { class: "toast", "data-tone": tone }, text);
  $("toasts").append(element);
  setTimeout(() => element.remove(), tone === "bad" ? 12000 : 5000);
}
