// The data of runs, which arrives as changes (see RunReader.update): `metrics` as columns, `groups` and `members` as
// columns in which repeated texts are indices into `words`, and the ids of kept rollouts.

class Run {
  constructor(number) {
    this.number = number;
    this.clear();
  }

  clear() {
    Object.assign(this, { iterations: [], columns: new Map(), groups: [], members: [], byId: new Map(), kept: new Set() });
    Object.assign(this, { byIteration: new Map(), headline: "", alarms: [], blocks: {}, left_out: "", cache: new Map(), messages: new Map() });
  }

  add(part) {
    if (part.reset) this.clear();
    for (const name of ["name", "state", "damage", "absent", "config", "headline", "alarms", "left_out"]) if (part[name] !== undefined) this[name] = part[name];
    Object.assign(this.blocks, part.blocks || {});
    part.kept.forEach((id) => this.kept.add(id));
    this.addMetrics(part.metrics);
    this.addGroups(part);
  }

  addMetrics(metrics) {
    const before = this.iterations.length;
    this.iterations.push(...metrics.iteration);
    for (const [name, values] of Object.entries(metrics.columns)) {
      if (!this.columns.has(name)) this.columns.set(name, new Array(before).fill(null));
      this.columns.get(name).push(...values);
    }
    for (const values of this.columns.values()) while (values.length < this.iterations.length) values.push(null);
  }

  addGroups({ groups, members, words }) {
    let at = 0;
    for (let i = 0; i < groups.iteration.length; i++) {
      const group = {
        iteration: groups.iteration[i], collected: groups.collected[i], id: groups.group_id[i],
        instance: words[groups.instance_id[i]], source: words[groups.source[i]], ready: groups.ready[i],
        code: words[groups.code[i]], reason: words[groups.reason[i]],
        versions: (words[groups.versions[i]] || "").split(" ").filter(Boolean), members: [],
      };
      for (const end = at + groups.size[i]; at < end; at++) {
        const member = {
          group, number: this.members.length, id: members.id[at], reward: members.reward[at],
          outcome: words[members.outcome[at]] || "unknown", why: words[members.why[at]] || "", tokens: members.tokens[at],
          turns: members.turns[at], samples: members.samples[at],
        };
        group.members.push(member);
        this.members.push(member);
        this.byId.set(member.id, member);
      }
      this.groups.push(group);
      if (!this.byIteration.has(group.iteration)) this.byIteration.set(group.iteration, []);
      this.byIteration.get(group.iteration).push(group);
    }
  }

  // Iterations with metrics or groups, in order.
  get steps() {
    return [...new Set([...this.iterations, ...this.byIteration.keys()])].sort((a, b) => a - b);
  }

  // Iterations and numbers of a metric; a line of validations begins with the one before training.
  points(name) {
    const places = (column, later) => this.iterations.map((step, i) => [step - later, (this.columns.get(column) || [])[i]]);
    const starts = name.startsWith("val/") ? places(name.replace("val/", "val/start_"), 1) : [];
    return [...starts, ...places(name, 0)].filter(([, value]) => typeof value === "number");
  }

  metric(name, iteration) {
    const at = this.iterations.indexOf(iteration);
    return at < 0 || !this.columns.has(name) ? null : this.columns.get(name)[at];
  }

  isKept(id) {
    return this.kept.has(id) && (App.live || Object.hasOwn(this.blocks, id));
  }

  async rollout(id) {
    if (!this.cache.has(id)) {
      if (this.cache.size > 20) this.cache.clear();
      this.cache.set(id, await this.load(id));
    }
    return this.cache.get(id);
  }

  // Ids of kept rollouts whose messages have the text, in any case.
  async idsWith(text) {
    if (App.live) {
      const answer = await fetch(`ids?run=${this.number}&text=${encodeURIComponent(text)}`);
      return new Set(answer.ok ? await answer.json() : []);
    }
    const ids = Object.keys(this.blocks), part = JSON.stringify(text).slice(1, -1).toLowerCase();
    for (const id of ids) if (!this.messages.has(id)) this.messages.set(id, JSON.stringify((await this.load(id)).messages ?? []).toLowerCase());
    return new Set(ids.filter((id) => this.messages.get(id).includes(part)));
  }

  async load(id) {
    if (Object.hasOwn(this.blocks, id)) return JSON.parse(document.getElementById(this.blocks[id]).textContent);
    if (!App.live || !this.kept.has(id)) return null;
    const answer = await fetch(`rollout?run=${this.number}&id=${encodeURIComponent(id)}`);
    return answer.ok ? answer.json() : null;
  }
}

// Mean and standard deviation of a group's rewards.
function spread(group) {
  const rewards = group.members.map((m) => m.reward).filter((r) => typeof r === "number");
  const average = mean(rewards);
  const deviation = rewards.length ? Math.sqrt(mean(rewards.map((r) => (r - average) ** 2))) : null;
  return { rewards, average, deviation, same: rewards.length > 1 && rewards.every((r) => r === rewards[0]) };
}

// The outcome of a group as one word and a sentence.
function fate(group) {
  const trained = group.members.filter((m) => m.outcome === "trained").length;
  if (trained) return ["trained", `${trained} of ${group.members.length} rollouts trained`];
  if (group.ready) return ["ready", "ready; not reported as trained"];
  return [group.code === "stale" ? "stale" : "filtered", group.reason || group.code || "dropped"];
}

const App = { runs: [], live: false, shown: new Set(), route: null };
