"""Loss curves of the demo's GPT in every precision, against fp32."""
