//! A gate with a table of its own, for tests that keep nothing else of an entry there.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use core::ops::Deref;

use riopipe_order::attribute::{Attribute, Member};
use riopipe_order::gate::{Cause, Gate, GateError, MemberCache, Node, Step, Table, Ticket};

#[derive(Debug)]
struct Nodes(Vec<Node>);

impl Table for Nodes {
    fn node(&self, ticket: Ticket) -> &Node {
        &self.0[ticket.0 as usize]
    }

    fn node_mut(&mut self, ticket: Ticket) -> &mut Node {
        &mut self.0[ticket.0 as usize]
    }
}

/// The gate, and its part of the entries.
#[derive(Debug)]
pub(crate) struct TableGate {
    gate: Gate,
    nodes: Nodes,
}

impl TableGate {
    pub(crate) fn new(members: &[MemberCache], capacity: u32) -> Self {
        Self::starting_at(1, members, capacity)
    }

    pub(crate) fn starting_at(first: u32, members: &[MemberCache], capacity: u32) -> Self {
        let nodes = Nodes(vec![Node::FREE; capacity as usize]);
        Self { gate: Gate::starting_at(first, members, capacity), nodes }
    }

    pub(crate) fn arrive(
        &mut self,
        ticket: Ticket,
        attribute: &Attribute,
        steps: &mut Vec<Step>,
    ) -> Result<(), GateError> {
        self.gate.on_arrival(&mut self.nodes, ticket, attribute, steps)
    }

    pub(crate) fn written(&mut self, ticket: Ticket, ok: bool, steps: &mut Vec<Step>) {
        self.gate.on_write_done(&mut self.nodes, ticket, ok, steps);
    }

    pub(crate) fn flushed(&mut self, ticket: Ticket, ok: bool, steps: &mut Vec<Step>) {
        self.gate.on_flush_done(&mut self.nodes, ticket, ok, steps);
    }

    pub(crate) fn poison(&mut self, cause: Cause, steps: &mut Vec<Step>) {
        self.gate.poison(&mut self.nodes, cause, steps);
    }

    pub(crate) fn flush_failed_on(&mut self, member: Member, steps: &mut Vec<Step>) -> bool {
        self.gate.on_flush_failed(&mut self.nodes, member, steps)
    }

    pub(crate) fn append_failed(&mut self, at: usize, cause: Cause, steps: &mut Vec<Step>) {
        self.gate.on_append_failed(&mut self.nodes, at, cause, steps);
    }

    pub(crate) fn fence_failed(&mut self, steps: &mut Vec<Step>) {
        self.gate.on_fence_failed(&mut self.nodes, steps);
    }
}

impl Deref for TableGate {
    type Target = Gate;

    fn deref(&self) -> &Gate {
        &self.gate
    }
}
